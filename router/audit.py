"""The books of every worker, asked live and added up."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from router.guard import Guard
from router.workers import WorkerHandle, WorkerPool
from twinpool.core.errors import DeadlineExceeded, ServingError


async def audit_workers(pool: WorkerPool, *, timeout_s: float) -> tuple[bool, list[dict[str, object]]]:
    """Ask every member for its books, all at the same time.

    Returns:
        Whether every member answered within ``timeout_s`` with blocks that add up, and the answers.
        One that did not answer, or whose sum is wrong, carries an ``error``.
    """
    answers = await asyncio.gather(*(_ask(handle, timeout_s) for handle in pool.handles))
    return all("error" not in answer for answer in answers), list(answers)


async def _ask(handle: WorkerHandle, timeout_s: float) -> dict[str, object]:
    answer: dict[str, object] = {"id": handle.worker_id, "role": handle.info.role.value}
    try:
        with Guard(handle, timeout_s=timeout_s):
            audit = await handle.ports.worker.audit()
    except DeadlineExceeded:
        return {**answer, "error": f"no answer within {timeout_s} s"}
    except ServingError as error:
        return {**answer, "error": str(error)}
    blocks = audit.blocks
    answer |= {
        "blocks": asdict(blocks),
        "tickets": audit.tickets,
        "transfers": audit.transfers,
        "sequences": audit.sequences,
    }
    found = blocks.free + blocks.cached + blocks.owned + blocks.draining
    if found != blocks.total or blocks.total != handle.info.num_blocks:
        answer["error"] = f"{found} blocks are accounted for, {handle.info.num_blocks} exist"
    return answer
