"""`twinpool demo`."""

from __future__ import annotations

import argparse

from twinpool.cluster.demo import run_demo


def demo(args: argparse.Namespace) -> int:
    """Show both ways of serving beside each other; the exit code is 0 if they gave the same tokens."""
    return run_demo(model=args.model, max_tokens=args.max_tokens)
