"""Is a folder a checkpoint we may read?  Looks at names, links and the shard index; reads no weight.

Only safetensors are weights, and nothing in the folder is ever run: an ``auto_map`` or a Python file
beside the weights is ignored.  Every link must stay inside the folder, but for a snapshot of the
Hugging Face hub's cache, whose links point at ``blobs`` two levels up.
"""

from __future__ import annotations

import json
from pathlib import Path

from twinpool.core.errors import ModelError

_FIELD = "--model"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def check_folder(folder: Path) -> None:
    """Refuse a folder that is no safe safetensors checkpoint.

    Raises:
        ModelError: A needed file is missing, weights are pickles, or a name or link leads out of the folder.
    """
    entries = sorted(folder.iterdir())
    for entry in entries:
        if entry.is_symlink():
            _check_link(entry, folder.resolve())
    if not (folder / "config.json").is_file():
        raise ModelError(_FIELD, f"{folder} has no config.json")
    if (folder / _INDEX).exists():
        _check_index(folder)
    elif not any(entry.suffix == ".safetensors" for entry in entries):
        pickles = [entry.name for entry in entries if entry.suffix in _PICKLES]
        if pickles:
            raise ModelError(_FIELD, f"{folder} has only pickled weights ({pickles[0]}), which can run code")
        raise ModelError(_FIELD, f"{folder} has no safetensors weights")


def _check_link(link: Path, folder: Path) -> None:
    target = link.resolve()
    roots = [folder]
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        roots.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise ModelError(_FIELD, f"{link} is a link out of its folder")


def _check_index(folder: Path) -> None:
    path = folder / _INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(_FIELD, f"{path} cannot be read: {error}") from error
    for shard in shards:
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ModelError(_FIELD, f"{path} names {shard!r}, which is no safetensors file of this folder")
        if not (folder / shard).is_file():
            raise ModelError(_FIELD, f"{path} names {shard}, which is missing")
