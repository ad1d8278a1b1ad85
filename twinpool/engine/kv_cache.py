"""The paged KV cache of one rank, and its bytes as transfers see them.

Knows blocks and slots, not who owns them: ownership is the block pool's.

Shapes: N blocks, C tokens per block, S = N x C slots, T tokens, K KV heads of this rank, D head dim.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from torch import Tensor

from twinpool.core.layout import KVLayout, wire_bytes
from twinpool.core.payload import DevicePayload, HostPayload
from twinpool.core.ports import KVPayload, KVRange
from twinpool.engine.block_bytes import BlockPayload, Bytes, blocks_of, runs, scatter, scatter_columns
from twinpool.engine.wire_format import decode, encode


class KVCache:
    """Keys and values of all layers; implements ``KVStore``.

    The engine's thread stores into the blocks of sequences it runs; ``payload`` and ``write`` may be called
    from another thread meanwhile, for tokens that the engine does not store at that time, nor read if they
    are written: sequences may share the ones that are sent.
    On a GPU all of them use the device's default stream, which puts them in order.

    Args:
        layout: Shape and type of one token's KV.
        num_blocks: How many blocks there are.
        device: A torch device, as in ``cpu`` or ``cuda:0``.
        rank: Which of the layout's heads are kept here.

    Attributes:
        heads: Those heads, by their number in the model.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str, *, rank: int = 0) -> None:
        self.layout = layout
        self.heads = layout.rank_heads(rank)
        self.num_blocks = num_blocks
        self._device = torch.device(device)
        self._is_cpu = self._device.type == "cpu"
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        shape = (2, num_blocks * layout.block_tokens, len(self.heads), layout.head_dim)
        self._layers = [_zeros(shape, self._dtype, self._device) for _ in range(layout.num_layers)]
        self._slots = [(layer[0], layer[1]) for layer in self._layers]
        self._bytes: list[Bytes] = []  # [2, N, C, bytes of K x D], of a cache on a CPU
        if self._is_cpu:
            rows = (2, num_blocks, layout.block_tokens, -1)
            self._bytes = [layer.view(torch.uint8).numpy().reshape(rows) for layer in self._layers]

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer as slots, [S, K, D] each; views, not copies."""
        return self._slots[layer]

    def store(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Put the keys and values of T tokens into their slots; int64 slots, on the cache's device."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots_T, k_TKD)
        values.index_copy_(0, slots_T, v_TKD)

    def payload(self, part: KVRange, *, wire: str, on_device: bool = False) -> KVPayload:
        """Return the bytes of ``part``; see ``KVStore.payload``.

        On a CPU, whole tokens in the cache's own dtype are views of the cache: nothing is copied.
        """
        self._check(part)
        if self._is_own(wire) and self._is_cpu and part.heads == self.heads:
            return BlockPayload(self._bytes[part.layer], part)
        heads = self._own_heads(part)
        values = self._layers[part.layer][:, :, heads].index_select(1, self._device_slots(part))
        data = encode(values, wire)
        if self._is_cpu:
            return HostPayload([data.numpy().data])
        if on_device:
            return DevicePayload(data)
        pinned = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(data)
        return HostPayload([pinned.numpy().data])

    def write(self, payload: KVPayload, part: KVRange, *, wire: str) -> None:
        """Copy ``payload`` into the cache; see ``KVStore.write``."""
        self._check(part)
        num_heads, head_dim = len(part.heads), self.layout.head_dim
        needed = wire_bytes(wire, num_tokens=part.num_tokens, num_heads=num_heads, head_dim=head_dim)
        assert payload.nbytes == needed, f"{payload.nbytes} bytes came, needed are {needed}"
        heads = self._own_heads(part)
        if self._is_cpu and self._is_own(wire):
            data = np.frombuffer(_joined(payload), np.uint8)
            if part.heads == self.heads:
                scatter(self._bytes[part.layer], part, data)
            else:
                head_bytes = self.layout.head_dim * self._dtype.itemsize
                columns = slice(heads.start * head_bytes, heads.stop * head_bytes)
                scatter_columns(self._bytes[part.layer], part, data, columns)
            return
        values = decode(
            self._on_device(payload),
            wire,
            shape=(2, part.num_tokens, num_heads, head_dim),
            dtype=self._dtype,
        )
        self._layers[part.layer][:, :, heads].index_copy_(1, self._device_slots(part), values)

    def _is_own(self, wire: str) -> bool:
        return wire == self.layout.dtype

    def _own_heads(self, part: KVRange) -> slice:
        return slice(part.heads.start - self.heads.start, part.heads.stop - self.heads.start)

    def _on_device(self, payload: KVPayload) -> Tensor:
        """Return the payload as bytes on the cache's device."""
        tensor = payload.tensor()
        if tensor is not None:
            return cast(Tensor, tensor).to(self._device)
        if self._is_cpu:
            return torch.frombuffer(_joined(payload), dtype=torch.uint8)
        pinned = torch.empty(payload.nbytes, dtype=torch.uint8, pin_memory=True)
        start = 0
        for view in payload.views():
            pinned.numpy()[start : start + view.nbytes] = np.frombuffer(view, np.uint8)
            start += view.nbytes
        return pinned.to(self._device, non_blocking=True)

    def _check(self, part: KVRange) -> None:
        assert 0 <= part.layer < self.layout.num_layers, f"layer {part.layer} of {self.layout.num_layers}"
        held = len(part.blocks) * self.layout.block_tokens
        end = part.first_token + part.num_tokens
        assert part.first_token >= 0 and part.num_tokens > 0 and end <= held, (
            f"tokens {part.first_token} to {end} of blocks that hold {held}"
        )
        blocks = blocks_of(part, self.layout.block_tokens)
        assert min(blocks) >= 0 and max(blocks) < self.num_blocks, f"blocks {min(blocks)} to {max(blocks)}"
        assert part.heads and part.heads[0] in self.heads and part.heads[-1] in self.heads, (
            f"heads {part.heads} of a rank that keeps {self.heads}"
        )

    def _device_slots(self, part: KVRange) -> Tensor:
        slots = torch.empty(part.num_tokens, dtype=torch.int64)
        for start, end, slot in runs(part, self.layout.block_tokens):
            slots[start:end] = torch.arange(slot, slot + end - start)
        return slots.to(self._device)


def _joined(payload: KVPayload) -> memoryview:
    views = payload.views()
    return views[0] if len(views) == 1 else memoryview(bytearray().join(views))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; those on a CPU take no memory and no time until they are first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)  # calloc: torch would write them all
    return torch.from_numpy(pages).view(dtype).view(shape)
