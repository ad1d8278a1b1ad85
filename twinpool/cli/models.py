"""`twinpool models`: fetch a model before it is served, and list what was fetched."""

from __future__ import annotations

import argparse
import sys

from twinpool.checkpoints.cache import user_cache_dir
from twinpool.checkpoints.resolve import resolve_model


def pull(args: argparse.Namespace) -> int:
    """Fetch and convert a model; print its folder."""
    print(resolve_model(args.model, progress=lambda text: print(f"twinpool: {text}", file=sys.stderr)))
    return 0


def list_models(args: argparse.Namespace) -> int:
    """Print the folders of all converted models with their sizes."""
    folder = user_cache_dir() / "models"
    for model in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (model / "config.json").is_file():
            size_bytes = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
            print(f"{model}  {size_bytes / 2**20:.0f} MiB")
    return 0
