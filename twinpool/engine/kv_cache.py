"""The paged KV cache of one worker, and its bytes as transfers see them.

Knows blocks and slots, not who owns them: ownership is the block pool's.

Shapes: N blocks, C tokens per block, S = N x C slots, T tokens, K KV heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinpool.core.layout import KVLayout


class KVCache:
    """Keys and values of all layers; implements ``KVStore``.

    The engine's thread stores into the blocks of sequences it runs; ``read`` and ``write`` may be called from
    another thread meanwhile, for blocks whose tokens the engine neither stores nor reads at that time.
    On a GPU all of them use the device's default stream, which puts them in order.

    Args:
        layout: Shape and type of one token's KV.
        num_blocks: How many blocks there are.
        device: A torch device, as in ``cpu`` or ``cuda:0``.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._device = torch.device(device)
        shape = (2, num_blocks * layout.block_tokens, layout.num_kv_heads, layout.head_dim)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self._layers = [_zeros(shape, dtype, self._device) for _ in range(layout.num_layers)]
        self._slots = [(layer[0], layer[1]) for layer in self._layers]
        self._token_bytes = layout.layer_token_bytes // 2

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer as slots, [S, K, D] each; views, not copies."""
        return self._slots[layer]

    def store(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Put the keys and values of T tokens into their slots; int64 slots, on the cache's device."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots_T, k_TKD)
        values.index_copy_(0, slots_T, v_TKD)

    def read(self, *, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int) -> memoryview:
        """Copy tokens ``first_token`` and on of the sequence stored in ``blocks`` into one buffer.

        Returns:
            Bytes of ``[2, num_tokens, K, D]`` elements, keys before values; the caller's own.
        """
        self._check(layer, blocks, first_token, num_tokens)
        runs = self._runs(blocks, first_token, num_tokens)
        if self._device.type == "cpu":
            out = np.empty((2, num_tokens, self._token_bytes), dtype=np.uint8)
            source = self._bytes(layer)
            for start, end, slot in runs:
                out[:, start:end] = source[:, slot : slot + end - start]
            return out.data.cast("B")
        values = self._layers[layer].index_select(1, self._device_slots(runs, num_tokens))
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values)
        return pinned.view(torch.uint8).numpy().data.cast("B")

    def write(
        self, payload: memoryview, *, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int
    ) -> None:
        """Copy ``payload``, exactly ``num_tokens`` tokens of one layer as ``read`` gives them."""
        self._check(layer, blocks, first_token, num_tokens)
        needed = num_tokens * self.layout.layer_token_bytes
        assert payload.nbytes == needed, (
            f"{payload.nbytes} bytes for {num_tokens} tokens, needed are {needed}"
        )
        source = np.frombuffer(payload, dtype=np.uint8).reshape(2, num_tokens, self._token_bytes)
        runs = self._runs(blocks, first_token, num_tokens)
        if self._device.type == "cpu":
            target = self._bytes(layer)
            for start, end, slot in runs:
                target[:, slot : slot + end - start] = source[:, start:end]
            return
        pinned = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
        np.copyto(pinned.numpy(), source)
        kv = self._layers[layer]
        values = pinned.to(self._device, non_blocking=True).view(kv.dtype)
        kv.index_copy_(1, self._device_slots(runs, num_tokens), values.view(2, num_tokens, *kv.shape[2:]))

    def _check(self, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int) -> None:
        assert 0 <= layer < self.layout.num_layers, f"layer {layer} of {self.layout.num_layers}"
        held = len(blocks) * self.layout.block_tokens
        end = first_token + num_tokens
        assert first_token >= 0 and num_tokens > 0 and end <= held, (
            f"tokens {first_token} to {end} of blocks that hold {held}"
        )
        assert min(blocks) >= 0 and max(blocks) < self.num_blocks, f"blocks {min(blocks)} to {max(blocks)}"

    def _runs(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> list[tuple[int, int, int]]:
        """Cut the range into neighbours in the cache: (from, to) of the range, and the slot they begin at."""
        runs: list[tuple[int, int, int]] = []
        for start, end, slot in self._block_parts(blocks, first_token, num_tokens):
            if runs and runs[-1][2] + runs[-1][1] - runs[-1][0] == slot:
                runs[-1] = (runs[-1][0], end, runs[-1][2])
            else:
                runs.append((start, end, slot))
        return runs

    def _block_parts(
        self, blocks: Sequence[int], first_token: int, num_tokens: int
    ) -> Iterator[tuple[int, int, int]]:
        block_tokens = self.layout.block_tokens
        start = 0
        while start < num_tokens:
            index, offset = divmod(first_token + start, block_tokens)
            end = min(num_tokens, start + block_tokens - offset)
            yield start, end, blocks[index] * block_tokens + offset
            start = end

    def _bytes(self, layer: int) -> npt.NDArray[np.uint8]:
        """View one layer as bytes, [2, S, bytes of a token's keys]."""
        flat: npt.NDArray[np.uint8] = self._layers[layer].flatten(2).view(torch.uint8).numpy()
        return flat

    def _device_slots(self, runs: Sequence[tuple[int, int, int]], num_tokens: int) -> Tensor:
        slots = torch.empty(num_tokens, dtype=torch.int64)
        for start, end, slot in runs:
            slots[start:end] = torch.arange(slot, slot + end - start)
        return slots.to(self._device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; those on a CPU take no memory and no time until they are first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)  # calloc: torch would write them all
    return torch.from_numpy(pages).view(dtype).view(shape)
