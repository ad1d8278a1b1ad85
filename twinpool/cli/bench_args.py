"""What the options of `bench` ask for: a workload, and how it is sent."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.cli import options
from twinpool.core.config import bind, load_yaml, merge
from twinpool.core.errors import ConfigError
from twinpool.core.units import parse_seconds
from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.workload.workload import Workload, open_workload


@dataclass(frozen=True, slots=True)
class Asked:
    """A run as it is asked for."""

    workload: Workload
    config: BenchConfig


def asked(args: argparse.Namespace) -> Asked:
    """Return what the options, and below them the file of ``--config``, ask for.

    Raises:
        ConfigError: A setting is unknown or cannot work, or no workload is named.
    """
    file = {} if args.config is None else load_yaml(Path(args.config))
    given = merge(file, options.settings(args))
    for name in given:
        if name not in ("workload", "bench"):
            raise ConfigError(name, "is none of bench, workload")
    spec = args.workload or given.get("workload")
    if not isinstance(spec, str | Mapping):
        raise ConfigError("workload", "is missing, as in synthetic:arrival=poisson(2),count=100")
    workload = open_workload(spec)
    if args.speed is not None:
        workload = workload.at_speed(args.speed)
    limits = {
        f"{name}_s": parse_seconds(text, field=f"--{name}")
        for name, text in (("ttft", args.ttft), ("tpot", args.tpot))
        if text is not None
    }
    url = args.url or os.environ.get("TWINPOOL_URL")
    over: dict[str, Any] = {"limits": limits} | ({} if url is None else {"url": url})
    return Asked(workload, bind(BenchConfig, merge(_mapping(given.get("bench", {})), over), "bench"))


def api_key_of(args: argparse.Namespace) -> str | None:
    """Return the key that requests carry, if any."""
    return args.api_key or os.environ.get("TWINPOOL_API_KEY")


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError("bench", "is not a mapping")
    return value
