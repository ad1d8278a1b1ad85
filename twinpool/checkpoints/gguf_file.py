"""The container of a GGUF file: metadata, and tensors that are read when asked for.

Knows the layout of the bytes and nothing of models.  The ``gguf`` library's own reader makes three
Python objects of each token of a vocabulary and takes seconds; this one walks the header once.

Source: the GGUF specification in ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from twinpool.core.errors import ModelError

_FIELD = "--model"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]  # as numpy has it: rows first
    quantization: str  # a name of gguf.GGMLQuantizationType
    begin: int  # bytes from the start of the file
    end: int


class GGUFFile:
    """One open GGUF file.

    Args:
        path: The file; it is mapped, not read.

    Raises:
        ModelError: It is no little-endian GGUF file of version 2 or 3, it is cut short, or a tensor's
            quantization is unknown.
    """

    metadata: Mapping[str, Any]  # scalars as Python values, arrays as lists
    tensors: Mapping[str, GGUFTensor]

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(_FIELD, f"{path} cannot be read: {error}") from error
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
            raise ModelError(_FIELD, f"{path} is damaged: {error}") from error

    def load(self, name: str) -> npt.NDArray[np.float32]:
        """Return the tensor ``name``, dequantised to float32, in the shape of ``tensors[name]``.

        Raises:
            ModelError: Its quantization cannot be undone.
        """
        tensor = self.tensors[name]
        raw = np.frombuffer(self._bytes[tensor.begin : tensor.end], dtype=np.uint8)
        try:
            values = dequantize(
                raw.reshape(*tensor.shape[:-1], -1), GGMLQuantizationType[tensor.quantization]
            )
        except NotImplementedError as error:
            raise ModelError(
                _FIELD,
                f"{self._path}: tensor {name} has quantization {tensor.quantization}, which is not known",
            ) from error
        return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)

    def _read_header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        cursor = _Cursor(self._bytes)
        if cursor.take(4) != b"GGUF":
            raise ModelError(_FIELD, f"{self._path} is no GGUF file")
        version = cursor.scalar("I")
        if version not in {2, 3}:
            raise ModelError(_FIELD, f"{self._path} is GGUF of version {version}, known are 2 and 3")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        found = [self._read_tensor(cursor) for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-cursor.position // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in found:
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
            num_bytes = int(np.prod(shape, dtype=np.int64)) // block_elements * block_bytes
            begin = start + offset
            if begin + num_bytes > len(self._bytes):
                raise ModelError(_FIELD, f"{self._path} is cut short in tensor {name}")
            tensors[name] = GGUFTensor(
                name=name, shape=shape, quantization=kind.name, begin=begin, end=begin + num_bytes
            )
        return metadata, tensors

    def _read_tensor(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.string()
        dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        code, offset = cursor.scalar("I"), cursor.scalar("Q")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise ModelError(
                _FIELD, f"{self._path}: tensor {name} has quantization number {code}, which is not known"
            ) from error
        return name, tuple(reversed(dims)), kind, offset


class _Cursor:
    """Reads values one after another; running over the end raises ``struct.error``."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        taken = self._data[self.position : self.position + num_bytes]
        if len(taken) != num_bytes:
            raise struct.error("the file ends inside its header")
        self.position += num_bytes
        return taken

    def scalar(self, code: str) -> Any:
        form = struct.Struct("<" + code)
        return form.unpack(self.take(form.size))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            form = struct.Struct(f"<{count}{_SCALARS[item]}")
            return list(form.unpack(self.take(form.size)))
        return [self.value(item) for _ in range(count)]
