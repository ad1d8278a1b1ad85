"""What the options of `recommend` ask: a workload, the GPUs there may be, and limits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.cli.lab_args import lab_settings, limits_of, section_of, workload_of
from twinpool.core.config import bind, merge
from twinpool.core.errors import ConfigError
from twinpool.core.units import parse_bytes
from twinpool.lab.memory.planned_model import PlannedModel
from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.workload.calls import scalar, split
from twinpool.lab.workload.workload import Workload

_PRICES = ("cost", "watts", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question as it is asked."""

    workload: Workload
    config: RecommendConfig
    model: PlannedModel | None


def asked(args: argparse.Namespace) -> Asked:
    """Return what the options, and below them the file of ``--config``, ask.

    Raises:
        ConfigError: A setting is unknown or cannot work, or no workload or no profile is named.
    """
    given = lab_settings(args, "recommend", "workload")
    workload = workload_of(args, given, count=400)
    question = section_of(given, "recommend")
    config = bind(RecommendConfig, merge(question, _of_options(args, question)), "recommend")
    return Asked(workload=workload, config=config, model=_model(args))


def _of_options(args: argparse.Namespace, question: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if args.profile:
        told["kinds"] = [read_kind(text) for text in args.profile]
    elif "kinds" not in question:
        raise ConfigError("--profile", "is missing, as in h100-llama-3.1-8b:cost=2.5")
    limits = limits_of(args)
    if limits:
        told["limits"] = limits
    if args.bandwidth is not None:
        told["transfer"] = {"bytes_s": float(parse_bytes(args.bandwidth, field="--bandwidth"))}
    if args.no_mixed:
        told["has_mixed"] = False
    if args.no_what_if:
        told["has_what_if"] = False
    return told


def read_kind(text: str) -> dict[str, Any]:
    """Read ``PROFILE`` or ``PROFILE:cost=2.5,watts=700,memory=80GB``; the values are those of one GPU.

    Raises:
        ConfigError: It is neither.
    """
    profile, colon, rest = text.rpartition(":")
    if not colon or "=" not in rest:
        return {"profile": text}
    told: dict[str, Any] = {"profile": profile}
    for part in split(rest, "--profile"):
        key, _, value = part.partition("=")
        if key not in _PRICES:
            raise ConfigError("--profile", f"{key!r} is none of {', '.join(_PRICES)}")
        if key == "memory":
            told["memory_bytes"] = parse_bytes(value, field="--profile")
        else:
            told[key] = scalar(value)
    return told


def _model(args: argparse.Namespace) -> PlannedModel | None:
    if args.model is None:
        return None
    from twinpool.checkpoints.resolve import resolve_config
    from twinpool.lab.memory.planned_model import read_model

    return read_model(resolve_config(args.model, progress=lambda line: print(line, file=sys.stderr)))
