"""What `bench`, `simulate` and `recommend` ask in the same words: a workload, limits, settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinpool.cli import options
from twinpool.core.config import load_yaml, merge
from twinpool.core.errors import ConfigError
from twinpool.core.units import parse_seconds
from twinpool.lab.workload.workload import Workload, open_workload


def lab_settings(args: argparse.Namespace, *known: str) -> Mapping[str, Any]:
    """Return what ``--set``, and below it the file of ``--config``, say.

    Args:
        args: Of the command.
        known: The sections that there are, in alphabetical order.

    Raises:
        ConfigError: The file cannot be read, or there is another section.
    """
    file = {} if args.config is None else load_yaml(Path(args.config))
    given = merge(file, options.settings(args))
    for name in given:
        if name not in known:
            raise ConfigError(name, f"is none of {', '.join(known)}")
    return given


def section_of(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return one section, empty if it is not there.

    Raises:
        ConfigError: It is something else.
    """
    section = given.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(name, "is not a mapping")
    return section


def workload_of(args: argparse.Namespace, given: Mapping[str, Any], *, count: int = 100) -> Workload:
    """Return the workload that is named; ``count`` is that of the example in the error.

    Raises:
        ConfigError: None is named, or it cannot be.
    """
    spec = args.workload or given.get("workload")
    if not isinstance(spec, str | Mapping):
        raise ConfigError("workload", f"is missing, as in synthetic:arrival=poisson(2),count={count}")
    return open_workload(spec)


def limits_of(args: argparse.Namespace) -> dict[str, float]:
    """Return those of ``--ttft`` and ``--tpot`` that are given, as fields of ``Limits``.

    Raises:
        ConfigError: One is no time.
    """
    return {
        f"{name}_s": parse_seconds(text, field=f"--{name}")
        for name, text in (("ttft", args.ttft), ("tpot", args.tpot))
        if text is not None
    }
