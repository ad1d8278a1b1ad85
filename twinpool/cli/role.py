"""`twinpool role`: a worker of a running server gets another role."""

from __future__ import annotations

import argparse
import math
import urllib.parse

from twinpool.cli.client import client_of
from twinpool.core.errors import ConfigError

_MARGIN_S = 60.0  # beyond the time for what runs: another change may be under way, and books must empty


def role(args: argparse.Namespace) -> int:
    """Wait until the worker has its new role, and say what it cost.

    Raises:
        ConfigError: The time is none.
        ServingError: The worker has its old role.
    """
    if not (math.isfinite(args.timeout) and args.timeout > 0):
        raise ConfigError("--timeout", f"{args.timeout:g} is not above 0")
    done = client_of(args).post(
        f"/admin/workers/{urllib.parse.quote(args.worker, safe='')}/role",
        {
            "role": args.role,
            "timeout_s": args.timeout,
            "clear_cache": args.clear_cache,
            "force": args.force,
        },
        timeout_s=args.timeout + _MARGIN_S,
    )
    words = [f"{args.worker} was {args.role} already" if done["was"] == args.role else _changed(done)]
    if done["moved"]:
        words.append(f"{done['moved']} of its requests went on elsewhere")
    if done["freed_blocks"] is not None:
        words.append(f"{done['freed_blocks']} cached blocks are free")
    print("; ".join(words))
    return 0


def _changed(done: dict[str, object]) -> str:
    return f"{done['worker']}, {done['was']} until now, is {done['role']} after {done['took_s']:.1f} s"
