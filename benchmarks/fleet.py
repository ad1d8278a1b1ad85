"""Workers in processes of their own, asked as a router asks them, and how long that takes."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

import psutil

from benchmarks.worker import WorkerSpec
from twinpool.core.clock import SystemClock
from twinpool.core.config import unbind
from twinpool.core.request import Request, SamplingParams
from twinpool.core.security import Trust
from twinpool.core.ticket import TransferReport
from twinpool.core.tls import Party
from twinpool.rpc.clients import DecodeClient, PrefillClient, WorkerChannel

_START_S, _ANSWER_S = 120.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One answer of three tokens; times since it was asked for, by one clock."""

    reserved_s: float
    first_s: float
    second_s: float
    third_s: float
    report: TransferReport

    @property
    def transfer_s(self) -> float:
        """From the first KV that came to the last."""
        report = self.report
        assert report.complete_s is not None and report.first_frame_s is not None, "KV was sent"
        return report.complete_s - report.first_frame_s

    @property
    def tail_s(self) -> float:
        """How long after the first token the last KV came; negative: before it."""
        assert self.report.complete_s is not None, "it was answered"
        return self.reserved_s + self.report.complete_s - self.first_s


class Fleet:
    """Running workers, by their ids."""

    def __init__(self, workers: dict[str, _Running]) -> None:
        self._workers = workers
        self._clock = SystemClock()
        self._numbers = itertools.count()

    @property
    def token_bytes(self) -> int:
        """Of the KV of one token."""
        return next(iter(self._workers.values())).token_bytes

    async def answer(self, prompt_ids: Sequence[int], *, prefill: str, decode: str) -> Timing:
        """Return how long a disaggregated answer takes."""
        request = self._request(prompt_ids, max_tokens=3)
        decoder = DecodeClient(self._workers[decode].channel, self._clock)
        asked_s = self._clock.now_s()
        ticket = await decoder.reserve(request, sender_id=prefill)
        times_s = [self._clock.now_s() - asked_s]
        first = await PrefillClient(self._workers[prefill].channel).prefill(request, ticket)
        times_s.append(self._clock.now_s() - asked_s)
        async with aclosing(decoder.resume(ticket, first)) as outputs:
            async for _ in outputs:
                times_s.append(self._clock.now_s() - asked_s)
        report = await decoder.release(ticket)
        reserved_s, first_s, second_s, third_s = times_s
        return Timing(
            reserved_s=reserved_s, first_s=first_s, second_s=second_s, third_s=third_s, report=report
        )

    async def prefill_s(self, prompt_ids: Sequence[int], *, prefill: str) -> float:
        """Return how long a prompt takes whose KV stays where it is."""
        asked_s = self._clock.now_s()
        request = self._request(prompt_ids, max_tokens=1)
        await PrefillClient(self._workers[prefill].channel).prefill(request, None)
        return self._clock.now_s() - asked_s

    def cpu_s(self, *worker_ids: str) -> float:
        """Return the processor time of these workers since their start, in steps of 10 ms."""
        times = [psutil.Process(self._workers[name].process.pid).cpu_times() for name in worker_ids]
        return sum(time.user + time.system for time in times)

    def _request(self, prompt_ids: Sequence[int], *, max_tokens: int) -> Request:
        return Request(
            request_id=f"q{next(self._numbers)}",
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            timeout_s=_ANSWER_S,
        )


@asynccontextmanager
async def fleet(*specs: WorkerSpec) -> AsyncIterator[Fleet]:
    """Start workers; they have ended when the block has."""
    async with AsyncExitStack() as stack:
        yield Fleet({spec.worker_id: await _start(stack, spec) for spec in specs})


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    process: asyncio.subprocess.Process
    channel: WorkerChannel
    token_bytes: int


async def _start(stack: AsyncExitStack, spec: WorkerSpec) -> _Running:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.worker", json.dumps(unbind(spec))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    stack.push_async_callback(_end, process)
    assert process.stdout is not None
    async with asyncio.timeout(_START_S):
        told = json.loads(await process.stdout.readline() or "{}")
    if not told:
        raise SystemExit(f"{spec.worker_id} does not start")
    channel = WorkerChannel(told["address"], spec.worker_id, trust=Trust(party=Party.ROUTER))
    stack.push_async_callback(channel.close)
    return _Running(process, channel, told["token_bytes"])


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(20.0):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
