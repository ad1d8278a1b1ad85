"""The prefix caches of every worker, emptied on request."""

from __future__ import annotations

import asyncio

from router.guard import Guard
from router.workers import WorkerHandle, WorkerPool
from twinpool.core.errors import DeadlineExceeded, ServingError


async def clear_caches(pool: WorkerPool, *, timeout_s: float) -> tuple[bool, list[dict[str, object]]]:
    """Let every member forget the KV that it keeps for later requests, all at the same time.

    Returns:
        Whether every member did so within ``timeout_s``, and for each how many blocks became free, or the
        ``error`` that kept it from doing so.
    """
    answers = await asyncio.gather(*(_clear(handle, timeout_s) for handle in pool.handles))
    return all("error" not in answer for answer in answers), list(answers)


async def _clear(handle: WorkerHandle, timeout_s: float) -> dict[str, object]:
    try:
        with Guard(handle, timeout_s=timeout_s):
            return {"id": handle.worker_id, "freed_blocks": await handle.ports.worker.clear_cache()}
    except DeadlineExceeded:
        return {"id": handle.worker_id, "error": f"no answer within {timeout_s} s"}
    except ServingError as error:
        return {"id": handle.worker_id, "error": str(error)}
