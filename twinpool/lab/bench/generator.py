"""The load generator: sends each request when it is due, whatever became of those before it.

One story: the next request is made ready while it is not yet due; then it is sent; its answer comes by itself
and leaves a record.  Nothing waits for an answer, so a server that stalls meets all the requests that were
due in that time, and each of them counts from when it was due.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

from twinpool.lab.bench.bodies import Requests
from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.bench.connection import ConnectionPool
from twinpool.lab.bench.sent import SentRequest
from twinpool.lab.bench.timeline import inside
from twinpool.lab.record import Record
from twinpool.lab.workload.item import WorkItem

_LEAD_S = 0.05  # the workload begins so long after the start, so that its first request can be ready
_INTERRUPTED = "interrupted"
_CROWD = 16  # requests that are sent in a row, where they are due together, before answers are looked at


class LoadGenerator:
    """One run against one server.

    Args:
        requests: Makes what is sent.
        pool: Connections to the server.
        config: Deadlines, and who leaves.
        on_record: Called with each request that has ended, in the order of their ends.
    """

    def __init__(
        self,
        requests: Requests,
        pool: ConnectionPool,
        config: BenchConfig,
        *,
        on_record: Callable[[Record], None],
    ) -> None:
        self.num_sent = 0
        self.most_in_flight = 0
        self.is_stopped = False
        self.first_problem = ""  # the first error, with what the server said of it
        self.num_uncounted = 0  # answers whose tokens the server did not count
        self.num_other_length = 0  # answers that are longer or shorter than asked
        self._requests = requests
        self._pool = pool
        self._config = config
        self._on_record = on_record
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._deadlines: dict[SentRequest, asyncio.TimerHandle] = {}  # of those that go on
        self._failure: Exception | None = None  # of ``on_record``; it ends the run
        self._looks: set[asyncio.Task[None]] = set()  # for what the server knows of one that has ended
        self._woken = self._loop.create_future()  # what the run waits for: its end, or for the next request

    @property
    def num_in_flight(self) -> int:
        return len(self._deadlines)

    @property
    def _is_over(self) -> bool:
        return self.is_stopped or self._failure is not None

    @property
    def elapsed_s(self) -> float:
        """Time since the workload began."""
        return max(0.0, self._loop.time() - self._start_s)

    def stop(self) -> None:
        """Send nothing more, and give up what goes on as ``interrupted``."""
        self.is_stopped = True
        self._wake()

    async def run(self, workload: Iterable[WorkItem]) -> None:
        """Send all of a workload, which is in the order of arrival, and wait until all of it has ended.

        What ``on_record`` raises ends the run at once, and is raised here when the rest is given up.
        """
        self._start_s = self._loop.time() + _LEAD_S
        try:
            await self._send_all(workload)
            while self._deadlines and not self._is_over:
                await self._wait()
        finally:
            for sent in list(self._deadlines):
                self._give_up(sent, _INTERRUPTED)
            await asyncio.gather(*self._looks)
        if self._failure is not None:
            raise self._failure

    async def _send_all(self, workload: Iterable[WorkItem]) -> None:
        for number, item in enumerate(workload):
            request = self._requests.request(item)
            sent = SentRequest(item, request, start_s=self._start_s, on_end=self._ended)
            if sent.due_s > self._loop.time():
                await self._until(sent.due_s)
            elif number % _CROWD == 0:
                await asyncio.sleep(0)
            if self._is_over:
                return
            self._send(sent)

    async def _until(self, time_s: float) -> None:
        """Wait for a time, or until the run is stopped."""
        while self._loop.time() < time_s and not self._is_over:
            alarm = self._loop.call_at(time_s, self._wake)
            await self._wait()
            alarm.cancel()

    async def _wait(self) -> None:
        self._woken = self._loop.create_future()
        await self._woken

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    def _send(self, sent: SentRequest) -> None:
        error, after_s = self._fate(sent.item)
        self._deadlines[sent] = self._loop.call_at(sent.due_s + after_s, self._give_up, sent, error)
        self.num_sent += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        self._pool.begin(sent)

    def _fate(self, item: WorkItem) -> tuple[str, float]:
        """Say what ends a request that is not answered, and when: its deadline, or a client that leaves."""
        share, timeout_s = self._config.cancel_share, self._config.timeout_s
        if share and random.Random(f"{self._config.seed} leaves {item.index}").random() < share:
            return "cancelled", min(self._config.cancel_after_s, timeout_s)
        return "timeout", timeout_s

    def _give_up(self, sent: SentRequest, error: str) -> None:
        self._pool.give_up(sent)
        sent.give_up(error, self._loop.time())
        self._ended(sent)

    def _ended(self, sent: SentRequest) -> None:
        self._deadlines.pop(sent).cancel()
        if sent.error not in ("", _INTERRUPTED) and not self.first_problem:
            self.first_problem = f"{sent.error} {sent.message}".strip()
        if not sent.error:
            self.num_uncounted += not sent.is_counted
            self.num_other_length += not sent.is_as_long_as_asked
        if self._config.timelines and not sent.error:
            look = self._loop.create_task(self._look(sent))
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)
        else:
            self._note(sent.record())
        if not self._deadlines:
            self._wake()

    async def _look(self, sent: SentRequest) -> None:
        """Record a request with what the server knows of it."""
        target, request_id = self._requests.target, self._requests.request_id(sent.item)
        queue_s, kv_bytes = await inside(self._pool, target, request_id)
        self._note(sent.record(queue_s=queue_s, kv_bytes=kv_bytes))

    def _note(self, record: Record) -> None:
        try:
            self._on_record(record)
        except Exception as error:  # noqa: BLE001 - the event loop would log it, and the run never end
            self._failure = self._failure or error
            self._wake()
