"""One request on its way through the simulated deployment: the story of ``router/router.py``, in events.

    arrive -> line -> claim -> D reserves -> P computes, KV leaves -> first token
                                                                        `- KV whole -> D decodes -> end

Where a request waits, is placed, tried again and given up is decided by the live parts of the router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from router.claim import Claim
from router.http.errors import verdict_of
from router.placing import Placing
from router.tries import Tries, is_refusal
from router.waiting_line import Waiter, WaitingLine
from router.workers import WorkerHandle
from twinpool.core.errors import (
    DeadlineExceeded,
    NoWorkers,
    ServingError,
    Unavailable,
)
from twinpool.core.ports import Role
from twinpool.core.request import Request, TokenOutput
from twinpool.engine.sequence import SequenceState
from twinpool.lab.record import Record
from twinpool.lab.simulate.cost_runner import TOKEN, Prompt
from twinpool.lab.simulate.timetable import Timetable
from twinpool.lab.simulate.token_times import TokenTimes
from twinpool.lab.simulate.transfer import SimulatedTransfer, Way
from twinpool.lab.simulate.worker import Command, SimulatedWorker
from twinpool.lab.workload.item import WorkItem


class Deployment(Protocol):
    """What a journey goes through."""

    timetable: Timetable
    line: WaitingLine[Claim]
    placing: Placing
    hop_s: float
    queue_timeout_s: float
    way: Way

    def worker(self, claim: Claim, role: Role) -> SimulatedWorker:
        """Return the worker of ``claim`` that prefills (PREFILL) or decodes (any other role)."""
        ...

    def can_answer(self) -> bool: ...

    def over(self, journey: Journey, record: Record) -> None:
        """Take note that a journey has ended."""
        ...


class Journey:
    """One request; implements ``worker.Client``, and ``waiting_line.Answer`` while it waits for room.

    Args:
        item: What was asked.
        request: The same, as workers get it.
        tries: Bounds its attempts.
        deployment: What it goes through.
    """

    __slots__ = (
        "_begun_s",
        "_claim",
        "_deadline_s",
        "_decode",
        "_decoding",
        "_deployment",
        "_is_over",
        "_is_sent",
        "_item",
        "_kv_bytes",
        "_num_attempts",
        "_num_cached",
        "_output_tokens",
        "_patience_s",
        "_prefill",
        "_prefilling",
        "_request",
        "_transfer",
        "_tries",
        "_turn",
        "_waiter",
        "path",
        "times",
    )

    def __init__(self, item: WorkItem, request: Request, tries: Tries, deployment: Deployment) -> None:
        self.times = TokenTimes()
        self.path = ""
        self._item = item
        self._request = request
        self._deadline_s = item.arrival_s + request.timeout_s
        self._tries = tries
        self._deployment = deployment
        self._turn = deployment.line.arrive(item.tenant)
        self._waiter: Waiter[Claim] | None = None
        self._claim: Claim | None = None
        self._prefill: SimulatedWorker | None = None  # of the current attempt
        self._decode: SimulatedWorker | None = None
        self._prefilling: SequenceState | None = None
        self._decoding: SequenceState | None = None
        self._transfer: SimulatedTransfer | None = None
        self._num_attempts = 0
        self._num_cached = 0
        self._output_tokens = 0
        self._kv_bytes = 0
        self._begun_s: float | None = None  # when there first was room
        self._patience_s = 0.0
        self._is_over = False
        self._is_sent = False  # all KV of the current attempt is where it is to be

    # The line.

    def seek(self, *, is_patient: bool = True) -> None:
        """Look for room, and wait for it if there is none."""
        now_s = self._deployment.timetable.time_s
        if is_patient:
            self._patience_s = now_s + self._deployment.queue_timeout_s
        line = self._deployment.line
        try:
            claim = line.enter(self._turn, self._place)
            if claim is not None:
                self._begin(claim)
                return
            self._waiter = None
            waiter = line.wait(self._turn, self._place, self)
        except ServingError as error:
            self._finish(error)
            return
        if self._claim is None and not self._is_over:
            self._waiter = waiter
            give_up_s = max(now_s, min(self._patience_s, self._deadline_s))
            self._deployment.timetable.at(give_up_s, partial(self._give_up, waiter))

    def refuse(self, error: ServingError) -> None:
        """End it before it began."""
        self._finish(error)

    def needs(self, worker: SimulatedWorker) -> bool:
        """Return whether its current attempt fails with ``worker``."""
        if self._claim is None:
            return False
        return worker is self._decode or (worker is self._prefill and not self._is_sent)

    def done(self) -> bool:
        return self._claim is not None or self._is_over

    def set_result(self, result: Claim, /) -> None:
        self._waiter = None
        self._begin(result)

    def set_exception(self, exception: BaseException, /) -> None:
        self._waiter = None
        assert isinstance(exception, ServingError), "places raise deliberate errors only"
        self._finish(exception)

    def _place(self) -> Claim | None:
        return self._deployment.placing.place(self._request, self._tries)

    def _give_up(self, waiter: Waiter[Claim]) -> None:
        if self._waiter is not waiter:
            return
        self._deployment.line.leave(waiter)
        self._waiter = None
        if self._deployment.timetable.time_s >= self._deadline_s:
            self._finish(DeadlineExceeded("the request's time was over before there was room"))
        elif self._deployment.can_answer():
            self._finish(Unavailable("no worker had room in time"))
        else:
            self._finish(NoWorkers("the workers needed were not ready in time"))

    # One attempt.

    def _begin(self, claim: Claim) -> None:
        self._claim = claim
        if not self._num_attempts:
            self._begun_s = self._deployment.timetable.time_s
        self._num_attempts += 1
        self._is_sent = False
        self.path = claim.path
        deployment = self._deployment
        self._prefill = None if claim.prefill is None else deployment.worker(claim, Role.PREFILL)
        self._decode = None if claim.decode is None else deployment.worker(claim, Role.DECODE)
        if self._prefill is None:
            assert self._decode is not None, "a claim without a worker"
            self._ask(claim.decode, self._decode.post, self._submit_here)
        elif self._decode is None:
            self._ask(claim.prefill, self._prefill.post, self._submit)
        else:
            post = partial(self._decode.post_reservation, num_tokens=self._request.num_tokens)
            self._ask(claim.decode, post, self._reserve)

    def _ask(self, handle: WorkerHandle | None, post: Callable[[Command], None], command: Command) -> None:
        """Let a worker obey ``command`` once it has got there, unless the attempt is over by then."""
        assert self._claim is not None and handle is not None, "nobody asks between two attempts"
        self._claim.asked = (handle,)
        self._later(partial(post, partial(self._obey, command, self._num_attempts)))

    def _obey(self, command: Command, attempt: int) -> None:
        if self._num_attempts == attempt and self._claim is not None:
            try:
                command()
            except ServingError as error:
                self._later(partial(self.failed, error))

    def _later(self, action: Command) -> None:
        """Do something on the other end of a hop."""
        hop_s = self._deployment.hop_s
        if hop_s:
            self._deployment.timetable.at(self._deployment.timetable.time_s + hop_s, action)
        else:
            action()

    def _handed_over(self) -> Request:
        """Return the request as an engine gets it now."""
        request = self._request
        left_s = self._deadline_s - self._deployment.timetable.time_s
        if left_s == request.timeout_s:
            return request
        return Request(  # what ``replace`` does, in half the time
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            timeout_s=left_s,
            output_ids=request.output_ids,
            cache_salt=request.cache_salt,
        )

    def _submit_here(self) -> None:
        assert self._decode is not None, "nobody decodes"
        self._decoding = self._decode.engine.submit(self._handed_over())
        self._decode.watch(self._decoding, self)

    def _reserve(self) -> None:
        worker = self._decode
        assert worker is not None, "nobody decodes"
        self._decoding = worker.engine.reserve(self._handed_over())
        worker.watch(self._decoding, self)
        self._later(self._reserved)

    def _reserved(self) -> None:
        if self._claim is None or self._prefill is None or self._decoding is None:  # it failed meanwhile
            return
        self._ask(self._claim.prefill, self._prefill.post, self._submit)

    def _submit(self) -> None:
        worker = self._prefill
        assert worker is not None, "nobody prefills"
        decode, decoding = self._decode, self._decoding
        self._prefilling = worker.engine.submit(self._handed_over(), has_destination=decode is not None)
        worker.watch(self._prefilling, self)
        if decode is not None:
            assert decoding is not None, "room is reserved first"
            self._transfer = self._deployment.way.transfer(
                worker, decode, num_tokens=self._request.num_tokens, first_token=decoding.num_cached_tokens
            )

    # What the workers say.

    def computes(self, prompt: Prompt, *, start_s: float, end_s: float) -> None:
        if self._transfer is not None:
            self._transfer.computes(prompt.end_token, start_s=start_s, end_s=end_s)

    def computed(self, prompt: Prompt) -> None:
        if self._transfer is not None:
            self._transfer.computed(is_last=prompt.is_last, now_s=self._deployment.timetable.time_s)

    def gave(self, output: TokenOutput) -> None:
        claim = self._claim
        assert claim is not None, "a token without an attempt"
        claim.has_answered = True
        if output.index == len(self._request.output_ids):
            if not self._output_tokens:
                self._num_cached = output.cached_tokens
            if self._transfer is not None:
                self._sent(self._transfer, output)
            claim.end_prefill()
        if output.index >= self._output_tokens:
            self._output_tokens = output.index + 1

    def _sent(self, transfer: SimulatedTransfer, first: TokenOutput) -> None:
        """Let the KV come through to its end, and then be decoded on from ``first``."""
        now_s = self._deployment.timetable.time_s
        number = self._num_attempts
        prefill, prefilling = self._prefill, self._prefilling
        assert prefill is not None and prefilling is not None, "nobody sends"
        whole_s = max(transfer.whole_s, now_s)
        self._kv_bytes += transfer.num_bytes

        def whole() -> None:
            prefill.post(partial(prefill.engine.drained, prefilling))
            prefill.forget(prefilling)
            if self._num_attempts == number and self._decode is not None:
                self._prefilling = None
                self._is_sent = True
                self._decode.post(arrive)

        def arrive() -> None:
            if self._num_attempts != number or self._decode is None or self._decoding is None:
                return
            try:
                self._decode.engine.arrived(self._decoding, first)
            except ServingError as error:
                self.failed(error)
            else:
                self._decode.decodes(self)

        asked_s = now_s + 2.0 * self._deployment.hop_s
        self._deployment.timetable.at(max(whole_s, asked_s), whole)

    def ended(self) -> None:
        self._output_tokens = self._request.sampling.max_tokens
        self._finish(None)

    def failed(self, error: ServingError) -> None:
        """End the attempt, and begin another one if there may be one."""
        claim = self._claim
        if claim is None or self._is_over:
            return
        self._leave()
        self._output_tokens = self.times.num_tokens
        claim.close()  # before it is written down what refused: that its room went back is no change there
        try:
            self._tries.failed(error, claim)
        except ServingError as last:
            self._finish(last)
            return
        refused = is_refusal(error, claim)
        if self._output_tokens > len(self._request.output_ids):
            self._request = replace(self._request, output_ids=(TOKEN,) * self._output_tokens)
        self.seek(is_patient=not refused)

    def _leave(self) -> None:
        """Give back what the attempt holds on its workers."""
        for worker, sequence in ((self._prefill, self._prefilling), (self._decode, self._decoding)):
            if worker is not None and sequence is not None and not worker.is_lost:
                worker.forget(sequence)
                worker.post(lambda worker=worker, sequence=sequence: _give_back(worker, sequence))  # type: ignore[misc]
        self._claim = None
        self._prefill = self._decode = self._prefilling = self._decoding = self._transfer = None

    def _finish(self, error: ServingError | None) -> None:
        self._is_over = True
        claim, self._claim = self._claim, None
        now_s = self._deployment.timetable.time_s
        times, item = self.times, self._item
        hop_s = self._deployment.hop_s
        self._deployment.over(
            self,
            Record(
                index=item.index,
                due_s=item.arrival_s,
                sent_s=item.arrival_s,
                first_token_s=None if times.first_s is None else times.first_s + hop_s,
                last_token_s=None if times.first_s is None else times.last_s + hop_s,
                gaps_s=tuple(times.gaps_s),
                end_s=now_s + hop_s,
                prompt_tokens=item.prompt_tokens,
                cached_tokens=self._num_cached,
                output_tokens=self._output_tokens,
                queue_s=None if self._begun_s is None else self._begun_s - item.arrival_s,
                kv_bytes=self._kv_bytes,
                path=self.path,
                error="" if error is None else verdict_of(error).code,
            ),
        )
        if claim is not None:
            claim.close()


def _give_back(worker: SimulatedWorker, sequence: SequenceState) -> None:
    worker.engine.abort(sequence)
    worker.engine.drained(sequence)
