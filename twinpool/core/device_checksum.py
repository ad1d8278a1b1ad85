"""A checksum that a GPU computes in one pass, for payloads that never come to host memory.

Uses only methods of the tensor it is given, so that it needs no torch and runs wherever the tensor is.
"""

from __future__ import annotations

from typing import Any

import xxhash

_MASK = 2**64 - 1
_STEP = 2 * 0x1E3779B97F4A7C15  # between the weights of two neighbours; even, so that weights are odd


def device_checksum(data: Any, identity: bytes) -> int:
    """Return 64 bits over ``identity`` and the bytes of a one-dimensional uint8 tensor.

    The sum, modulo 2**64, of every 8 bytes (little endian; the tail is padded with zeros) as a number times
    an odd weight of its place, mixed with the length and XXH3-64 of ``identity``.  An odd weight is
    invertible, so a change within one place is always noticed; two places weigh differently, so swapped ones
    are too, unless their difference times that of the weights is a multiple of 2**64.
    """
    num_bytes = data.shape[0]
    num_words = -(-num_bytes // 8)
    if num_bytes % 8 or data.storage_offset() % 8:
        padded = data.new_zeros(num_words * 8)
        padded[:num_bytes] = data
        data = padded
    words = data.view(dtype=_int64_of(data))
    weights = words.new_ones(num_words).cumsum(0).mul_(_STEP).add_(1)
    total = int((words * weights).sum().item())
    seed = int(xxhash.xxh3_64(identity + num_bytes.to_bytes(8, "little")).intdigest())
    return ((total & _MASK) * 0x9E3779B97F4A7C15 ^ seed) & _MASK


def _int64_of(data: Any) -> Any:
    return data.new_zeros(0).long().dtype
