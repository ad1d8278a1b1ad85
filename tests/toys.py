"""Small real things that many tests share: a layout, requests, a checkpoint of a few thousand weights."""

from __future__ import annotations

from twinpool.core.layout import KVLayout
from twinpool.core.request import Request, SamplingParams


def layout(
    *,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 4,
    block_tokens: int = 16,
    dtype: str = "float32",
    tp_size: int = 1,
) -> KVLayout:
    """A KV layout of 64 bytes per token and layer in fp32."""
    return KVLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        tp_size=tp_size,
    )


def request(
    prompt_ids: tuple[int, ...] = (1, 2, 3),
    *,
    request_id: str = "r0",
    max_tokens: int = 4,
    timeout_s: float = 30.0,
    **sampling: object,
) -> Request:
    """A greedy request; ``sampling`` overrides fields of SamplingParams."""
    params: dict[str, object] = {"seed": 0, "max_tokens": max_tokens, "temperature": 0.0, **sampling}
    return Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        timeout_s=timeout_s,
    )
