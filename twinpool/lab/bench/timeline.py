"""What a Twinpool server knows of one request that a client cannot see."""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.core.errors import Unavailable
from twinpool.lab.bench.connection import ConnectionPool
from twinpool.lab.bench.fetch import fetch
from twinpool.lab.bench.target import Target

_TIMEOUT_S = 10.0
_WAIT = "queue"  # the span that ends when the router has found room


async def inside(pool: ConnectionPool, target: Target, request_id: str) -> tuple[float | None, int]:
    """Return how long a request waited in the router, and how many bytes of KV it moved.

    Returns:
        None and 0 if the server does not know, or is no Twinpool server.
    """
    try:
        told = await fetch(pool, target, f"/admin/requests/{request_id}", timeout_s=_TIMEOUT_S)
    except Unavailable:
        return None, 0
    if not isinstance(told, Mapping):
        return None, 0
    ends = [
        float(span["end_s"])
        for span in told.get("spans", ())
        if isinstance(span, Mapping) and span.get("name") == _WAIT and span.get("end_s") is not None
    ]
    return min(ends, default=None), int(told.get("kv_bytes", 0))
