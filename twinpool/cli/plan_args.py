"""What `plan` was told, as the planner wants it."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace

import psutil

from twinpool.checkpoints.resolve import resolve_config
from twinpool.cluster.config import DeploymentConfig
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.core.units import parse_bytes
from twinpool.engine.config import EngineConfig
from twinpool.lab.memory.cache_format import cache_format
from twinpool.lab.memory.planned_model import PlannedModel, read_model
from twinpool.lab.memory.worker_plan import HeldLoad, WorkerShape

_ASK_GPU = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")  # in MiB
_ASK_LIMIT_S = 20.0
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_PEER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def model_of(args: argparse.Namespace, model: str, *, progress: Callable[[str], None]) -> PlannedModel:
    """Return the model of ``--model``; of one on the hub no more is fetched than its config.

    Raises:
        ModelError: There is none, or it cannot be planned.
        ConfigError: ``--parameters`` is no number.
    """
    num_parameters = None if args.parameters is None else _count(args.parameters)
    return read_model(resolve_config(model, progress=progress), num_parameters=num_parameters)


def workers_of(args: argparse.Namespace, config: DeploymentConfig) -> tuple[WorkerShape, ...]:
    """Return a worker of each role that the deployment has.

    Raises:
        ConfigError: An option cannot be read, or nobody knows how much memory there is.
    """
    is_gpu = config.device.startswith("cuda")
    memory_bytes = _memory_bytes(args, config)
    form = None if args.cache_format is None else cache_format(args.cache_format, field="--cache-format")
    reserve = None if args.reserve is None else parse_bytes(args.reserve, field="--reserve")
    load = None if args.load is None else _load(args.load)
    pools = {role: pool for role, pool in config.pools.by_role().items() if pool.workers}
    shapes = []
    for role, pool in pools.items():
        dtype = pool.dtype or config.dtype
        cache_bytes = None if config.kv_memory is None else parse_bytes(config.kv_memory)
        peers = pools.get(_PEER[role]) if role in _PEER else None
        shapes.append(
            WorkerShape(
                role=role,
                memory_bytes=memory_bytes,
                dtype=("bfloat16" if is_gpu else "float32") if dtype == "auto" else dtype,
                cache_form=form,
                is_gpu=is_gpu,
                num_ranks=pool.tensor_parallel,
                num_peers=0 if peers is None else peers.workers,
                peer_ranks=1 if peers is None else peers.tensor_parallel,
                num_threads=_threads(config),
                cache_bytes=None if cache_bytes is None else cache_bytes // pool.tensor_parallel,
                reserve_bytes=reserve,
                load=load,
                engine=_engine(config, pool.block_tokens),
                transfer=config.transfer,
            )
        )
    return tuple(shapes)


def numbers_of(text: str | None, *, field: str) -> tuple[int, ...]:
    """Read numbers above 0 with commas between them; none if there is no text.

    Raises:
        ConfigError: It is something else.
    """
    parts = [] if text is None else text.replace(" ", "").split(",")
    if not all(re.fullmatch(r"0*[1-9]\d{0,14}", part, flags=re.ASCII) for part in parts):
        raise ConfigError(field, f"{text!r} is no list of numbers above 0, as in 4096,16384")
    return tuple(int(part) for part in parts)


def _memory_bytes(args: argparse.Namespace, config: DeploymentConfig) -> int:
    """Return what each rank has: as told, or its share of what this machine has free."""
    if args.memory is not None:
        return parse_bytes(args.memory, field="--memory")
    if config.device == "cpu":
        return int(psutil.virtual_memory().available) // config.pools.num_ranks
    try:
        asked = subprocess.run(_ASK_GPU, capture_output=True, text=True, timeout=_ASK_LIMIT_S, check=True)
        return int(asked.stdout.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise ConfigError("--memory", "is missing, and there is no GPU here to ask; as in 80GB") from None


def _threads(config: DeploymentConfig) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.threads or max(1, cores // config.pools.num_ranks)


def _engine(config: DeploymentConfig, block_tokens: int | None) -> EngineConfig:
    return config.engine if block_tokens is None else replace(config.engine, block_tokens=block_tokens)


def _load(text: str) -> HeldLoad:
    match = re.fullmatch(r"(\d{1,9})x(\d{1,12})", text, flags=re.ASCII)
    if match is None:
        raise ConfigError("--load", f"{text!r} is not NxTOKENS, as in 32x8192")
    return HeldLoad(num_conversations=int(match[1]), num_tokens=int(match[2]))


def _count(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?)", text.strip().upper(), flags=re.ASCII)
    if match is None:
        raise ConfigError("--parameters", f"{text!r} is no number such as 7B or 135M")
    return int(float(match[1]) * _COUNTS[match[2]])
