"""KV between a cache's dtype and the format in which it travels.

Shapes: T tokens, K KV heads, D head dim; a part of one layer is [2, T, K, D], keys before values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinpool.core.layout import COMPACT

_INT8_MAX = 127.0


def encode(values_2TKD: Tensor, wire: str) -> Tensor:
    """Return the bytes of ``values`` in a wire format: one dimension, uint8, on the same device.

    Floats are rounded to the nearest, ties to even; what float16 cannot hold becomes its largest number.
    ``int8`` is off by at most half a scale, and a scale is the largest size of its row / 127.
    """
    if wire == COMPACT:
        return _encode_compact(values_2TKD)
    dtype: torch.dtype = getattr(torch, wire)
    return _to(values_2TKD, dtype).contiguous().view(torch.uint8).flatten()


def decode(data: Tensor, wire: str, *, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Return [2, T, K, D] in ``dtype`` from the bytes that ``encode`` gave."""
    if wire == COMPACT:
        return _decode_compact(data, shape, dtype)
    return _to(data.view(getattr(torch, wire)).view(shape), dtype)


def _to(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float16 and values.dtype != torch.float16:
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def _encode_compact(values_2TKD: Tensor) -> Tensor:
    floats = values_2TKD.float()
    scales_2TK = floats.abs().amax(dim=-1) / _INT8_MAX
    steps = torch.where(scales_2TK > 0, scales_2TK, 1.0)
    quantized = (floats / steps[..., None]).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return torch.cat([quantized.view(torch.uint8).flatten(), scales_2TK.view(torch.uint8).flatten()])


def _decode_compact(data: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    num_elements = shape[0] * shape[1] * shape[2] * shape[3]
    quantized = data[:num_elements].view(torch.int8).view(shape)
    # The scales may begin at an address that is no multiple of their size.
    scales_2TK = data[num_elements:].clone().view(torch.float32).view(shape[:3])
    return _to(quantized.float() * scales_2TK[..., None], dtype)
