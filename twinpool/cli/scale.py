"""`twinpool scale` and `twinpool replace`: change which workers a running server wants."""

from __future__ import annotations

import argparse

from twinpool.cli.client import client_of
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role


def scale(args: argparse.Namespace) -> int:
    """Tell the server how many workers of each named role it shall have; it gets there by itself.

    Raises:
        ConfigError: No role is named.
    """
    named = {role.value: getattr(args, role.value) for role in Role}
    wanted = {role: count for role, count in named.items() if count is not None}
    if not wanted:
        raise ConfigError("scale", f"needs one of {', '.join(f'--{role}' for role in Role)}")
    client_of(args).post("/admin/scale", wanted)
    print(f"wanted: {', '.join(f'{count} {role}' for role, count in wanted.items())}; see `twinpool status`")
    return 0


def replace(args: argparse.Namespace) -> int:
    """Tell the server to drain a worker and to start its successor."""
    client_of(args).post("/admin/replace", {"worker": args.worker})
    print(f"{args.worker} drains and is replaced; see `twinpool status`")
    return 0
