"""What the options of `bench` ask for: a workload, and how it is sent."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

from twinpool.cli.lab_args import lab_settings, limits_of, section_of, workload_of
from twinpool.core.config import bind, merge
from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.workload.workload import Workload


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
    given = lab_settings(args, "bench", "workload")
    workload = workload_of(args, given)
    if args.speed is not None:
        workload = workload.at_speed(args.speed)
    url = args.url or os.environ.get("TWINPOOL_URL")
    over: dict[str, Any] = {"limits": limits_of(args)} | ({} if url is None else {"url": url})
    return Asked(workload, bind(BenchConfig, merge(section_of(given, "bench"), over), "bench"))
