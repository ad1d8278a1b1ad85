"""The story of the system: admit, place, reserve, prefill, resume, release; survive a lost worker.

Knows workers as ports and requests as token ids; knows nothing of HTTP, text or sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from router.admission import Admission
from router.audit import audit_workers
from router.caches import clear_caches
from router.claim import Claim
from router.config import RouterConfig
from router.guard import Deadline, Guard, guarded_stream
from router.journey import Journey, continue_after
from router.log import RequestLog
from router.metrics import RouterMetrics
from router.own_ticket import check_ticket
from router.placing import Placing
from router.policy import load_policy
from router.roles import RoleChanger
from router.tenure import Reassigned
from router.tries import Tries, is_refusal
from router.workers import WorkerPool, WorkerState
from twinpool.core.clock import Clock
from twinpool.core.errors import (
    DeadlineExceeded,
    InternalError,
    NoWorkers,
    PromptTooLong,
    ServingError,
    TransferError,
    Unavailable,
    WorkerLost,
)
from twinpool.core.ports import Role
from twinpool.core.request import Request, TokenOutput
from twinpool.core.tasks import OwnedTasks
from twinpool.core.ticket import KVTicket, TransferReport
from twinpool.core.timeline import RequestTimeline


class Router:
    """Drives requests over the workers of one pool.

    Args:
        config: Limits.
        pool: The workers.
        clock: Of every deadline and timeline.

    Raises:
        ConfigError: There is no policy of the configured name.
    """

    def __init__(self, config: RouterConfig, *, pool: WorkerPool, clock: Clock) -> None:
        self.config = config
        self.pool = pool
        self.clock = clock
        self.log = RequestLog()
        self.metrics = RouterMetrics(
            pool, num_queued=lambda: self.num_queued, num_in_flight=lambda: self.num_in_flight
        )
        self.roles = RoleChanger(pool, config=config, clock=clock, metrics=self.metrics)
        self._admission: Admission[Claim] = Admission(
            max_queued=config.max_queued, overtake_s=config.overtake_s, clock=clock
        )
        self._placing = Placing(pool, load_policy(config.policy), on_freed=self._admission.wake)
        self._tasks = OwnedTasks()
        self._num_open = 0
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._is_draining = False
        self._logger = logging.getLogger("twinpool.router")
        pool.subscribe(self._admission.wake)

    @property
    def num_queued(self) -> int:
        """Requests that wait for room."""
        return self._admission.num_queued

    @property
    def num_in_flight(self) -> int:
        """Requests that were taken, have not ended and do not wait for room."""
        return self._num_open - self.num_queued

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now can be answered, if only by a fallback."""
        return self.pool.can_answer and not self._is_draining

    async def generate(
        self, request: Request, timeline: RequestTimeline, *, tenant: str = ""
    ) -> AsyncGenerator[TokenOutput, None]:
        """Stream the answer; a lost worker costs a second prefill, never a lost token.

        When ``aclose`` returns, the release of everything the request held has been sent.  One
        timeline belongs to one call.  Prompt log-probabilities come once, on the first output.

        Args:
            request: ``timeout_s`` is the deadline of the whole answer; the id is replaced per attempt.
            timeline: Filled on the way.
            tenant: Requests of different tenants wait in turn.

        Raises:
            PromptTooLong: It can never fit.
            Unavailable: No room or no worker in time, or too many failures; ``retry_after_s`` is set.
            TransferError: The KV did not arrive, ``max_attempts`` times.
            DeadlineExceeded: The answer was not complete in time.
        """
        self._begin(timeline)
        num_tokens = 0
        first_token_s: float | None = None
        try:
            async with aclosing(self._answer(request, timeline, tenant)) as outputs:
                async for output in outputs:
                    num_tokens += 1
                    if first_token_s is None:
                        first_token_s = timeline.now_s()
                        timeline.cached_tokens = output.cached_tokens
                        timeline.event("first_token")
                        self.metrics.first_token(
                            after_s=first_token_s, num_prompt_tokens=len(request.prompt_ids)
                        )
                    if output.finish is not None:
                        timeline.outcome = output.finish.value
                    self.metrics.token()
                    yield output
        except (GeneratorExit, asyncio.CancelledError):
            timeline.outcome = timeline.outcome or "cancelled"
            raise
        except BaseException as error:
            timeline.outcome = type(error).__name__
            raise
        finally:
            self._end(timeline, first_token_s=first_token_s, num_tokens=num_tokens)

    async def audit(self) -> dict[str, object]:
        """Ask every worker for its books and return them with this router's, as JSON values."""
        is_ok, workers = await audit_workers(self.pool, timeout_s=self.config.audit_timeout_s)
        return {
            "ok": is_ok,
            "workers": workers,
            "router": {"in_flight": self.num_in_flight, "queued": self.num_queued},
        }

    async def clear_caches(self) -> dict[str, object]:
        """Empty the prefix cache of every worker; return what came of it, as JSON values."""
        is_ok, workers = await clear_caches(self.pool, timeout_s=self.config.audit_timeout_s)
        return {"ok": is_ok, "workers": workers}

    async def drain(self, *, timeout_s: float) -> bool:
        """Take nothing new, wait for what is there; return whether all of it ended in time."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ended.wait()
                await self._tasks.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Drop what is still to be released; leases end it."""
        self._is_draining = True
        await self.roles.close()
        await self._tasks.close()

    async def _answer(
        self, request: Request, timeline: RequestTimeline, tenant: str
    ) -> AsyncGenerator[TokenOutput, None]:
        """Try until the answer is complete or must not be tried again."""
        self._check(request)
        journey = Journey(
            timeline=timeline,
            turn=self._admission.arrive(tenant),
            tries=Tries(
                max_attempts=self.config.max_attempts,
                on_transfer_failure=self.config.on_transfer_failure,
            ),
            deadline=Deadline(self.clock, timeout_s=request.timeout_s),
            patience=self._patience(),
        )
        sent: list[TokenOutput] = []
        while True:
            attempt = continue_after(request, sent, timeout_s=journey.deadline.left_s())
            claim = await self._admit(attempt, journey)
            try:
                async with (
                    self._held(claim, timeline),
                    aclosing(self._attempt(attempt, claim, journey)) as outputs,
                ):
                    async for output in outputs:
                        check_index(output, expected=len(request.output_ids) + len(sent))
                        claim.has_answered = True
                        sent.append(output)
                        yield output
                        if output.finish is not None:
                            return
                    raise WorkerLost(claim.asked[0].worker_id, "its stream ended before the answer did")
            except ServingError as error:
                if isinstance(error, Reassigned):
                    error.tenure.num_moved += 1
                if isinstance(error, TransferError):
                    self._note_failed_transfer(error, claim, timeline)
                journey.tries.failed(error, claim)
                if not is_refusal(error, claim):
                    journey.patience = self._patience()
                self._note_retry(error, timeline, num_sent=len(sent))

    async def _attempt(
        self, request: Request, claim: Claim, journey: Journey
    ) -> AsyncGenerator[TokenOutput, None]:
        """Run one attempt on the workers of ``claim``: the story in the words of the ports."""
        if claim.prefill is None:
            async with aclosing(self._generate_alone(request, claim, journey)) as outputs:
                async for output in outputs:
                    yield output
            return

        ticket = await self._reserve(request, claim, journey)
        first = await self._prefill(request, ticket, claim, journey)
        yield first
        if first.finish is not None:
            return
        if ticket is None:
            raise InternalError("the first token was to be the last, and was not")
        with journey.timeline.span("decode"):
            async with aclosing(self._resume(ticket, first, claim, journey)) as outputs:
                async for output in outputs:
                    yield output

    async def _generate_alone(
        self, request: Request, claim: Claim, journey: Journey
    ) -> AsyncGenerator[TokenOutput, None]:
        """Let the decode worker do everything."""
        decode = claim.decode
        assert decode is not None, "a claim without a worker"
        claim.asked = (decode,)
        answer = decode.ports.decode.generate(journey.hand_over(request))
        async with aclosing(
            guarded_stream(answer, claim.under(decode), deadline=journey.deadline)
        ) as outputs:
            with journey.timeline.span("prefill"):
                first = await anext(outputs, None)
            if first is None:
                return
            yield first
            with journey.timeline.span("decode"):
                async for output in outputs:
                    yield output

    async def _reserve(self, request: Request, claim: Claim, journey: Journey) -> KVTicket | None:
        """Return a ticket, or None if the answer needs no room after its first token."""
        decode = claim.decode
        if decode is None:
            return None
        claim.asked = (decode,)
        assert claim.prefill is not None, "room is reserved for what another worker computes"
        sender_id = claim.prefill.worker_id
        with journey.timeline.span("reserve") as span, journey.guard(claim.under(decode)):
            reserving = decode.ports.decode.reserve(journey.hand_over(request), sender_id=sender_id)
            claim.reserving = asyncio.ensure_future(reserving)
            ticket = await asyncio.shield(claim.reserving)
        check_ticket(ticket, decode=decode.info, sender_id=sender_id, request_id=request.request_id)
        claim.ticket = ticket
        # The worker's clock starts somewhere between the question and the answer.
        claim.reserved_s = (span.start_s + journey.timeline.now_s()) / 2
        span.detail["cached_tokens"] = ticket.cached_tokens
        return ticket

    async def _prefill(
        self, request: Request, ticket: KVTicket | None, claim: Claim, journey: Journey
    ) -> TokenOutput:
        """Return the first token; the tail of the KV may still be on its way."""
        prefill = claim.prefill
        assert prefill is not None, "no worker for the prompt"
        claim.asked = (prefill,)
        workers = (prefill,) if claim.decode is None else (prefill, claim.decode)
        watched = (claim.under(worker) for worker in workers)
        with journey.timeline.span("prefill"), journey.guard(*watched):
            first = await prefill.ports.prefill.prefill(journey.hand_over(request), ticket)
        claim.end_prefill()
        return first

    def _resume(
        self, ticket: KVTicket, first: TokenOutput, claim: Claim, journey: Journey
    ) -> AsyncGenerator[TokenOutput, None]:
        """Stream what follows ``first``; until then the prefill worker may still have KV to send."""
        assert claim.decode is not None and claim.prefill is not None, "a ticket joins two workers"
        claim.asked = (claim.decode,)
        return guarded_stream(
            claim.decode.ports.decode.resume(ticket, first),
            claim.under(claim.decode),
            also_first=(claim.under(claim.prefill),),
            deadline=journey.deadline,
        )

    async def _admit(self, request: Request, journey: Journey) -> Claim:
        """Wait for room and take it."""
        timeline = journey.timeline
        with timeline.span("queue") as span:
            try:
                claim = await self._admission.enter(
                    journey.turn,
                    lambda: self._placing.place(request, journey.tries),
                    timeout_s=min(journey.deadline.left_s(), journey.patience.left_s()),
                )
            except TimeoutError:
                raise self._no_room(journey.deadline) from None
        self.metrics.queued(timeline.now_s() - span.start_s)
        timeline.path = claim.path
        timeline.prefill_worker = None if claim.prefill is None else claim.prefill.worker_id
        timeline.decode_worker = None if claim.decode is None else claim.decode.worker_id
        if claim.path == "local" and self.pool.needs_prefill:
            self._note_local(claim, timeline)
        return claim

    @asynccontextmanager
    async def _held(self, claim: Claim, timeline: RequestTimeline) -> AsyncIterator[None]:
        """Give back what ``claim`` holds, however the block ends.

        The giving back is a task of its own: a second cancellation, or a worker that does not
        answer, ends the client's wait for it and not the giving back.
        """
        try:
            yield
        finally:
            giving_back = self._tasks.start(self._give_back(claim, timeline))
            await asyncio.wait({giving_back}, timeout=self.config.release_wait_s)

    async def _give_back(self, claim: Claim, timeline: RequestTimeline) -> None:
        """Release the ticket, also one whose answer is still on its way, and close the books."""
        reserving, decode = claim.reserving, claim.decode
        try:
            if reserving is not None and decode is not None:
                with Guard(decode, timeout_s=self.config.release_timeout_s):
                    await asyncio.wait({reserving})
                    if not reserving.cancelled() and reserving.exception() is None:
                        report = await decode.ports.decode.release(reserving.result())
                        self._record(report, claim, timeline)
        except ServingError as error:
            self._logger.info("a ticket is left to its lease: %s", error)
        finally:
            if reserving is not None:
                reserving.cancel()
            claim.close()

    def _record(self, report: TransferReport, claim: Claim, timeline: RequestTimeline) -> None:
        self.metrics.moved(report)
        timeline.kv_bytes += report.kv_bytes
        if claim.prefill is not None and claim.decode is not None:
            claim.decode.exchange_with(claim.prefill).ended(report)
        if report.first_frame_s is not None:
            timeline.add_span(
                "transfer",
                start_s=claim.reserved_s + report.first_frame_s,
                end_s=None if report.complete_s is None else claim.reserved_s + report.complete_s,
                kv_bytes=report.kv_bytes,
                num_frames=report.num_frames,
                cached_tokens=report.cached_tokens,
                transport=report.transport,
            )

    def _note_failed_transfer(self, error: TransferError, claim: Claim, timeline: RequestTimeline) -> None:
        policy, reason = self.config.on_transfer_failure, type(error).__name__
        self.metrics.transfer_failed(policy, reason)
        timeline.event(
            "transfer_failed",
            reason=reason,
            error=str(error),
            policy=policy,
            prefill_worker=timeline.prefill_worker,
            decode_worker=timeline.decode_worker,
        )
        if claim.prefill is not None and claim.decode is not None:
            claim.decode.exchange_with(claim.prefill).failed(reason)

    def _note_local(self, claim: Claim, timeline: RequestTimeline) -> None:
        """Count a prompt that a decode worker computes although there is to be somebody for prompts."""
        if claim.recomputes:
            self.metrics.fell_back("transfer_failed")
            timeline.event("recompute", reason=claim.recomputes)
            return
        is_there = any(
            handle.info.role is Role.PREFILL and handle.state is WorkerState.READY
            for handle in self.pool.handles
        )
        reason = "prefill_failed" if is_there else "no_prefill_worker"
        self.metrics.fell_back(reason)
        timeline.event("fallback", reason=reason)

    def _note_retry(self, error: ServingError, timeline: RequestTimeline, *, num_sent: int) -> None:
        reason = type(error).__name__
        self.metrics.retried(reason)
        timeline.event("retry", reason=reason, error=str(error), num_sent=num_sent)

    def _check(self, request: Request) -> None:
        if self._is_draining:
            raise Unavailable("the router stops and takes nothing new", retry_after_s=5.0)
        limit = self.pool.max_request_tokens
        if limit is not None and request.max_total_tokens + 1 > limit:
            raise PromptTooLong(needed_tokens=request.max_total_tokens + 1, limit_tokens=limit)

    def _no_room(self, deadline: Deadline) -> ServingError:
        if deadline.left_s() <= 0.0:
            return DeadlineExceeded("the request's time was over before there was room")
        waited = f"within {self.config.queue_timeout_s} s"
        if not self.pool.can_answer:
            return NoWorkers(f"the workers needed were not ready {waited}", retry_after_s=5.0)
        return Unavailable(f"no worker had room {waited}", retry_after_s=5.0)

    def _patience(self) -> Deadline:
        return Deadline(self.clock, timeout_s=self.config.queue_timeout_s)

    def _begin(self, timeline: RequestTimeline) -> None:
        self._num_open += 1
        self._all_ended.clear()
        self.log.add(timeline)

    def _end(self, timeline: RequestTimeline, *, first_token_s: float | None, num_tokens: int) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._all_ended.set()
        self.metrics.ended(timeline, first_token_s=first_token_s, num_tokens=num_tokens)


def check_index(output: TokenOutput, *, expected: int) -> None:
    """Check that no token was lost or repeated.

    Raises:
        InternalError: ``output`` is not the one that follows.
    """
    if output.index != expected:
        raise InternalError(f"output {output.index} came where {expected} follows")
