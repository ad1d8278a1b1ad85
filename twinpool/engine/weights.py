"""The tensors of a checkpoint: safetensors files, mapped rather than read, and counted.

Mapped pages belong to the page cache, so that several workers of one host share them as long as the
type on disk is the type asked for.  A rank that takes some rows of a matrix touches no others; columns
are copied together, and the copy is all it keeps.  Nothing else is ever opened: no pickle, no code from
the folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twinpool.core.errors import ModelError
from twinpool.engine.model_config import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Weights:
    """Tensors by name; each is taken once, and what nobody took is reported.

    Args:
        folder: Of the checkpoint.
        device: Where tensors go.
        dtype: What they are converted to.

    Raises:
        ModelError: A file is missing or damaged.
    """

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._tensors = {}
        for path in weight_files(folder):
            self._tensors.update(_mapped(path))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor on the device, in the dtype.

        Raises:
            ModelError: There is none of this name, or it has another shape.
        """
        return self._placed(self._whole(name, shape))

    def take_rows(self, name: str, rows: range, *shape: int) -> Tensor:
        """Return some rows of a tensor that has ``shape`` as a whole; else as ``take``."""
        return self._placed(self._whole(name, shape)[rows.start : rows.stop])

    def take_columns(self, name: str, columns: range, *shape: int) -> Tensor:
        """Return some columns of a matrix that has ``shape`` as a whole; else as ``take``."""
        return self._placed(self._whole(name, shape)[:, columns.start : columns.stop])

    def _placed(self, tensor: Tensor) -> Tensor:
        """Return it on the device, in the dtype, one row after the other."""
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the mapped tensor; nothing of it is read yet."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ModelError("--model", f"weight {name} is missing")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                "--model", f"weight {name} has shape {list(tensor.shape)}, needed is {list(shape)}"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelError(
                "--model", f"weight {name} has type {tensor.dtype}, needed is a float of 16 bits or more"
            )
        return tensor

    def drop(self, suffix: str) -> None:
        """Forget the tensors whose name ends so; they are known to carry nothing."""
        for name in [name for name in self._tensors if name.endswith(suffix)]:
            del self._tensors[name]

    def finish(self) -> None:
        """Check that all tensors were taken: an unread one means that the model is not what we think.

        Raises:
            ModelError: Some were not; the message names them.
        """
        if self._tensors:
            raise ModelError("--model", f"{len(self._tensors)} weights have no use: {_some(self._tensors)}")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """List the safetensors files of a checkpoint in the order of their names.

    Raises:
        ModelError: There are none, or the index names a file that is missing or outside the folder.
    """
    if not (folder / INDEX_FILE).is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise ModelError("--model", f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return (folder / SINGLE_FILE,)
    index = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ModelError("--model", f"{INDEX_FILE}: weight_map is no object of file names")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError("--model", f"{INDEX_FILE}: {name!r} is no safetensors file of this folder")
        if not (folder / name).is_file():
            raise ModelError("--model", f"weight file {name} is missing in {folder}")
    return tuple(folder / name for name in names)


def _mapped(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise ModelError("--model", f"{path.name} cannot be read: {error}") from error


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")
