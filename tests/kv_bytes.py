"""The bytes of a sequence in a cache, by token position."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.core.ports import KVRange
from twinpool.engine.kv_cache import KVCache


def kv_bytes(
    cache: KVCache, *, layer: int, blocks: Sequence[int], num_tokens: int, first_token: int = 0
) -> bytes:
    """Return ``[2, num_tokens, heads, head_dim]`` elements of one layer, in the cache's own dtype."""
    part = KVRange(
        layer=layer, blocks=blocks, first_token=first_token, num_tokens=num_tokens, heads=cache.heads
    )
    return b"".join(KVCache.payload(cache, part, wire=cache.layout.dtype).views())
