"""Shapes and types of a checkpoint's tensors, from the headers of its safetensors files.  Reads no tensor.

Source: the safetensors format, https://huggingface.co/docs/safetensors: 8 bytes of length, then JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from twinpool.core.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000  # as the library allows
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor on disk."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether loading converts it to the dtype of the model; others stay as they are."""
        return self.dtype in _FLOATS


def read_headers(folder: Path) -> Mapping[str, StoredTensor]:
    """Return all tensors of a checkpoint by name; none if it has no safetensors files.

    Raises:
        ModelError: A file is damaged.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(_read_header(path))
    return tensors


def _read_header(path: Path) -> Mapping[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        return {
            name: StoredTensor(
                shape=tuple(entry["shape"]),
                dtype=str(entry["dtype"]),
                num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError("--model", f"{path.name} cannot be read: {error}") from error
