"""The command line of Twinpool."""

from twinpool.cli.app import main

__all__ = ["main"]
