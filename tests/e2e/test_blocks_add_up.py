"""Blocks add up: whenever a client leaves, every block comes back, and the books hold at every moment."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from contextlib import aclosing
from pathlib import Path

from kv_transfer.config import TransferConfig
from router.config import RouterConfig
from tests.checkpoints_toy import make_checkpoint
from tests.system import System, system
from tests.toys import request
from twinpool.core.clock import SystemClock
from twinpool.core.timeline import RequestTimeline
from twinpool.engine.config import EngineConfig

NUM_REQUESTS = 300
PHASES = (
    "queue",
    "reserve",
    "prefill",
    "arrival",
    "decode",
)  # arrival: the first token is here, the KV is not


def test_random_aborts_in_every_phase_leave_nothing_behind(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", seed=3)

    async def scenario() -> tuple[Counter[str], bool]:
        engine = EngineConfig(max_chunk_tokens=16, max_batch_tokens=64, max_sequences=16)
        transfer = TransferConfig(lease_s=5.0, message_bytes=4096, credit_bytes=16384)
        router = RouterConfig(max_queued=NUM_REQUESTS, request_timeout_s=120.0, queue_timeout_s=120.0)
        async with system(
            folder,
            prefill=1,
            decode=2,
            transport="grpc",
            engine=engine,
            transfer=transfer,
            router=router,
            num_blocks=48,
        ) as running:
            warm_up = [_one(running, random.Random(i), Counter(), number=len(PHASES)) for i in range(8)]
            await asyncio.gather(*warm_up)  # every connection is made
            await running.settled()
            before = _resources()
            ended: Counter[str] = Counter()
            auditing = asyncio.create_task(_audit_for_ever(running))
            gate = asyncio.Semaphore(40)

            async def gated(number: int) -> None:
                async with gate:
                    await _one(running, random.Random(number), ended, number=number)

            await asyncio.gather(*(gated(number) for number in range(NUM_REQUESTS)))
            auditing.cancel()
            await asyncio.gather(auditing, return_exceptions=True)
            audit = await running.settled()
            assert audit["router"] == {"in_flight": 0, "queued": 0}
            assert all(now <= then for now, then in zip(_resources(), before, strict=True))
            return ended, bool(audit["ok"])

    ended, is_ok = asyncio.run(scenario())

    assert is_ok
    assert all(ended[phase] >= 5 for phase in (*PHASES, "complete")), f"not every phase was met: {ended}"


async def _one(running: System, rng: random.Random, ended: Counter[str], *, number: int) -> None:
    """Ask once, and leave in the phase that is this number's turn, a moment after it was noticed."""
    phase = (*PHASES, "complete")[number % (len(PHASES) + 1)]
    prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, 200)))
    asked = request(prompt, max_tokens=rng.randint(8, 40), timeout_s=120.0, ignore_eos=True)
    timeline = RequestTimeline(f"t{number}", SystemClock())
    num_outputs = 0

    async def consume() -> None:
        nonlocal num_outputs
        async with aclosing(running.router.generate(asked, timeline)) as outputs:
            async for output in outputs:
                assert output.index == num_outputs
                num_outputs += 1

    def now_in() -> str:
        name = timeline.spans[-1].name if timeline.spans else "queue"
        return "arrival" if name == "decode" and num_outputs == 1 else name

    consumer = asyncio.create_task(consume())
    while not consumer.done() and now_in() != phase:  # noqa: ASYNC110
        await asyncio.sleep(0.0005)
    await asyncio.sleep(rng.choice((0.0, 0.0, 0.002)))
    ended["complete" if consumer.done() else now_in()] += 1
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    assert consumer.cancelled() or consumer.exception() is None, consumer


async def _audit_for_ever(running: System) -> None:
    while True:
        audit = await running.router.audit()
        assert audit["ok"], audit
        await asyncio.sleep(0.02)


def _resources() -> tuple[int, int, int]:
    """Return open files, threads and shared memory segments of this process."""
    open_files, segments = (len(list(Path(folder).iterdir())) for folder in ("/proc/self/fd", "/dev/shm"))
    return open_files, threading.active_count(), segments
