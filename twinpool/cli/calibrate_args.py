"""What the options of `calibrate` ask for, and the server that is asked then."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from twinpool.cli import options
from twinpool.core.config import bind, load_yaml, merge, unbind
from twinpool.core.errors import ConfigError
from twinpool.lab.calibrate.config import CalibrateConfig

_POINTS = ("prompts", "cached", "prompt_batches", "decode_batches", "contexts", "transfer_tokens")
_DEPLOYMENT = ("model", "device", "dtype", "kv_memory", "threads", "engine")  # settings of `serve` too


def config_of(args: argparse.Namespace) -> CalibrateConfig:
    """Return what the options ask for.

    Raises:
        ConfigError: One of them cannot be; it is named as the setting that it sets.
    """
    points = {name: _numbers(name, getattr(args, name)) for name in _POINTS}
    asked = {name: value for name, value in points.items() if value is not None}
    if args.transports:
        asked["transports"] = args.transports.split(",")
    counts = {"repeats": args.repeats, "workers": args.workers}
    asked |= {name: value for name, value in counts.items() if value is not None}
    file = {} if args.config is None else load_yaml(Path(args.config))
    return bind(CalibrateConfig, merge(merge(file, options.settings(args)), asked), "calibrate")


def serve_options(config: CalibrateConfig) -> list[str]:
    """Return the options of a `twinpool serve` with such workers, all of them colocated."""
    given = {**unbind(config), "threads": config.num_threads}
    told = ["--colocated", str(config.workers)]
    for name in _DEPLOYMENT:
        if given[name] is not None:
            told += ["--set", f"{name}={json.dumps(given[name])}"]
    return told


def _numbers(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(f"calibrate.{name}", f"{text!r} is no list of numbers such as 8,32,128")
    return [int(part) for part in parts]
