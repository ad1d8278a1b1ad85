"""What the options of `simulate` ask for: a workload, a deployment, and limits."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from twinpool.cli.lab_args import lab_settings, limits_of, section_of, workload_of
from twinpool.core.config import bind
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.core.units import parse_bytes
from twinpool.lab.metrics.limits import Limits
from twinpool.lab.simulate.config import SimulationConfig, parse_layout
from twinpool.lab.workload.workload import Workload

_LAYOUT = "1P1D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A simulation as it is asked for."""

    workload: Workload
    config: SimulationConfig
    limits: Limits


def asked(args: argparse.Namespace) -> Asked:
    """Return what the options, and below them the file of ``--config``, ask for.

    Raises:
        ConfigError: A setting is unknown or cannot work, or no workload or no profile is named.
    """
    given = lab_settings(args, "engine", "simulation", "workload")
    workload = workload_of(args, given)
    if args.speed is not None:
        workload = workload.at_speed(args.speed)
    simulation = section_of(given, "simulation")
    config = bind(SimulationConfig, {**simulation, **_pools(args, given, simulation)}, "simulation")
    if args.bandwidth is not None:
        bytes_s = float(parse_bytes(args.bandwidth, field="--bandwidth"))
        config = replace(config, transfer=replace(config.transfer, bytes_s=bytes_s))
    return Asked(workload=workload, config=config, limits=Limits(**limits_of(args)))


def _pools(
    args: argparse.Namespace, given: Mapping[str, Any], simulation: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the pools that options name; those of the file count if there are none of these."""
    if args.layout is None and args.profile is None and args.decode_profile is None and "pools" in simulation:
        if "engine" in given:
            raise ConfigError("engine", "goes with --layout; each pool of a file has an engine of its own")
        return {}
    if args.profile is None:
        raise ConfigError("--profile", "is missing, as in h100-llama-3.1-8b; --profiles lists them")
    engine = section_of(given, "engine")
    return {
        "pools": [
            {
                "role": role.value,
                "workers": workers,
                "profile": args.decode_profile or args.profile if role is Role.DECODE else args.profile,
                "engine": engine,
            }
            for role, workers in parse_layout(args.layout or _LAYOUT)
        ]
    }
