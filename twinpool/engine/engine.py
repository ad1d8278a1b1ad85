"""A worker's engine: plan, run, commit.

It has no mode.  A sequence with a destination leaves after its prompt, one without stays and decodes,
and one that was reserved gets its KV from elsewhere.  Driven from one thread; knows no torch, no
thread and no asyncio.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from twinpool.core.clock import Clock
from twinpool.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RankLost,
    RequestCancelled,
)
from twinpool.core.ports import BlockCounts
from twinpool.core.request import Request, TokenOutput
from twinpool.engine.config import EngineConfig
from twinpool.engine.plan import BatchPlan, ItemResult, LayerHook, Runner
from twinpool.engine.policy import load_policy
from twinpool.engine.scheduler import Scheduler, StepResult
from twinpool.engine.sequence import SequenceState, SequenceStatus

WrittenHook = Callable[[int, tuple[tuple[SequenceState, int], ...]], None]
"""``(layer, ((sequence, num_tokens), ...))``: the KV of tokens ``[0, num_tokens)`` of ``layer`` is in the
cache, for each sequence of the batch that has a destination.  Called in the thread that runs the step."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine must know of its model and its cache."""

    num_blocks: int
    max_model_tokens: int  # the model's context, prompt and answer together
    vocab_size: int | None  # every token id is below; None: nobody looks, the runner takes any
    eos_ids: frozenset[int] = frozenset()  # the model's own end tokens


class Engine:
    """Runs the sequences of one worker, a batch a step.

    Args:
        runner: Computes a batch.
        config: Sizes of steps and lines; names the policy.
        limits: Of the model and the cache that the runner holds.
        clock: Read at each step and each arrival.

    Raises:
        ConfigError: There is no such policy.
    """

    def __init__(self, runner: Runner, *, config: EngineConfig, limits: EngineLimits, clock: Clock) -> None:
        self._runner = runner
        self._config = config
        self._limits = limits
        self._clock = clock
        self._scheduler = Scheduler(
            config, load_policy(config.policy), num_blocks=limits.num_blocks, eos_ids=limits.eos_ids
        )
        self._num_arrivals = 0
        self._most_tokens = min(limits.max_model_tokens - 1, limits.num_blocks * config.block_tokens)

    @property
    def has_work(self) -> bool:
        """Whether a sequence wants to be computed; it may still have to wait for blocks."""
        return self._scheduler.has_work

    @property
    def num_sequences(self) -> int:
        """Sequences that are not FINISHED."""
        return self._scheduler.num_sequences

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a newcomer can get; cached ones are among them."""
        return self._scheduler.pool.num_available

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """All that are not FINISHED."""
        return self._scheduler.sequences

    @property
    def decoding(self) -> Sequence[SequenceState]:
        """Those that get a token a step, oldest first; to read, until the next call."""
        return self._scheduler.decoding

    @property
    def counters(self) -> Mapping[str, int]:
        """Totals since the start: steps, preemptions, tokens, ends by reason."""
        return self._scheduler.counters

    def counts(self) -> BlockCounts:
        return self._scheduler.counts()

    def clear_cache(self) -> int:
        """Forget all KV that could be used again; return how many cached blocks became free."""
        return self._scheduler.pool.clear()

    def submit(self, request: Request, *, has_destination: bool = False) -> SequenceState:
        """Let a request wait for its first step.

        With a destination it only needs room for its prompt here.  Its blocks are then never taken
        away, and it holds them after its first token until ``drained``.

        Raises:
            InvalidRequest: It can never be run.
            PromptTooLong: It can never fit.
            QueueFull: Too many wait.
        """
        sequence = self._new_sequence(request, SequenceStatus.WAITING, has_destination)
        if self._scheduler.num_waiting >= self._config.max_waiting:
            raise QueueFull(f"{self._scheduler.num_waiting} sequences wait already")
        self._scheduler.enqueue(sequence)
        return sequence

    def reserve(self, request: Request) -> SequenceState:
        """Take room for the KV of a request whose prompt is computed elsewhere.

        The first ``num_cached_tokens`` tokens of the sequence need not be sent: their KV is here.

        Raises:
            InvalidRequest: It can never be run.
            PromptTooLong: It can never fit.
            NoFreeBlocks: Nothing was taken.
        """
        sequence = self._new_sequence(request, SequenceStatus.RECEIVING, has_destination=False)
        self._scheduler.hold(sequence, now_s=sequence.arrived_s)
        return sequence

    def arrived(self, sequence: SequenceState, first: TokenOutput) -> None:
        """Decode a reserved sequence whose KV is whole; ``first`` is the token that follows it.

        Raises:
            InternalError: ``first`` does not follow the request, or nothing can follow it: no client gave it.
            DeadlineExceeded, RequestCancelled: The reservation ended before.
        """
        if sequence.status is not SequenceStatus.RECEIVING:
            if self._clock.now_s() >= sequence.deadline_s:
                raise DeadlineExceeded(f"{sequence.request.timeout_s:g} s are over, the KV came too late")
            raise RequestCancelled(f"the reservation is over, the sequence is {sequence.status}")
        expected = sequence.num_output_tokens
        if first.index != expected:
            raise InternalError(f"first: token {first.index} of the answer came, {expected} is next")
        if first.finish is not None or expected + 1 >= sequence.request.sampling.max_tokens:
            raise InternalError("first: no token can follow it")
        if self._limits.vocab_size is not None and not 0 <= first.token_id < self._limits.vocab_size:
            raise InternalError(f"first: {first.token_id} is not in the vocabulary")
        self._scheduler.start_decoding(sequence, first.token_id)

    def abort(self, sequence: SequenceState) -> None:
        """End a request; under a transfer its blocks stay until ``drained``.  Idempotent."""
        if sequence.is_over:
            return
        self._scheduler.counters["aborted"] += 1
        self._scheduler.end(sequence)

    def drained(self, sequence: SequenceState) -> None:
        """Take the blocks back: no transfer of this sequence touches them any more.  Idempotent.

        A sequence that still lives by its transfer (PREFILLING with a destination, RECEIVING) is aborted;
        one that decodes here or still waits is left alone.
        """
        if sequence.status in (SequenceStatus.PREFILLING, SequenceStatus.RECEIVING):
            if not sequence.is_under_transfer:
                return
            self.abort(sequence)
        self._scheduler.drained(sequence)

    def step(self, on_written: WrittenHook | None = None) -> StepResult:
        """End what is over its deadline, then run one batch: plan, run, commit.

        Raises:
            RankLost: The worker cannot go on.
        """
        now_s = self._clock.now_s()
        expired = self._scheduler.expire(now_s)
        plan = self._scheduler.plan(now_s)
        if not plan.items:
            return StepResult(failed=expired)
        result = self._scheduler.commit(plan, self._run(plan, on_written))
        self._scheduler.counters["steps"] += 1
        return result._replace(failed=expired + result.failed) if expired else result

    @property
    def next_deadline_s(self) -> float:
        """No sequence has an earlier deadline; infinite if there is none."""
        return self._scheduler.next_deadline_s

    def steady_steps(self) -> int:
        """Return how many of the next steps only give every decoding sequence a token; see ``decode_ahead``.

        It stays so, less what was booked, until something else of the engine is called.
        """
        return self._scheduler.steady_steps()

    def blocks_ahead(self, num_steps: int) -> int:
        """Return how many blocks so many steady steps take."""
        return self._scheduler.blocks_ahead(num_steps)

    def decode_ahead(self, num_steps: int, token_id: int) -> tuple[SequenceState, ...]:
        """Leave everything as ``num_steps`` calls of ``step`` would in which the runner chose ``token_id``.

        For a simulator, to which most steps are all alike; nothing is run.

        Args:
            num_steps: At most ``steady_steps``, and none at or after ``next_deadline_s``.
            token_id: Ends none of the answers.

        Returns:
            The sequences that ended by their length, in the last step.
        """
        self._scheduler.counters["steps"] += num_steps
        return self._scheduler.decode_ahead(num_steps, token_id)

    def _run(self, plan: BatchPlan, on_written: WrittenHook | None) -> tuple[ItemResult, ...]:
        try:
            results = self._runner.run(plan, _layer_hook(plan, on_written))
        except RankLost:
            raise  # no further batch can be computed either
        except Exception as error:  # noqa: BLE001 - whatever broke, it ends this batch and not the worker
            _log.exception("a step of %d sequences failed", len(plan.items))
            self.clear_cache()  # KV that made it fail would do so to everybody who finds it
            message = f"the step failed: {type(error).__name__}"
            results = tuple(ItemResult(error=InternalError(message)) for _ in plan.items)
        return results

    def _new_sequence(self, request: Request, status: SequenceStatus, has_destination: bool) -> SequenceState:
        self._check(request, has_destination)
        number = self._num_arrivals
        self._num_arrivals += 1
        return SequenceState(
            number=number,
            request=request,
            arrived_s=self._clock.now_s(),
            has_destination=has_destination,
            status=status,
        )

    def _check(self, request: Request, has_destination: bool) -> None:
        """Refuse at once what can never be run here."""
        if not request.prompt_ids:
            raise InvalidRequest("prompt", "it is empty")
        self._check_ids(request)
        if len(request.output_ids) >= request.sampling.max_tokens:
            raise InvalidRequest(
                "max_tokens",
                f"{len(request.output_ids)} tokens of {request.sampling.max_tokens} are there already",
            )
        # The last token chosen needs no KV, so one more than the pool holds can be served.
        num_tokens = request.num_tokens if has_destination else request.max_total_tokens
        if num_tokens > self._most_tokens:
            raise PromptTooLong(needed_tokens=num_tokens + 1, limit_tokens=self._most_tokens + 1)

    def _check_ids(self, request: Request) -> None:
        size = self._limits.vocab_size
        if size is None:
            return
        ids = request.prompt_ids + request.output_ids
        if min(ids) < 0 or max(ids) >= size:
            raise InvalidRequest("prompt", f"token ids are from 0 to {size - 1}")
        if any(not 0 <= token_id < size for token_id, _ in request.sampling.logit_bias):
            raise InvalidRequest("logit_bias", f"token ids are from 0 to {size - 1}")


def _layer_hook(plan: BatchPlan, on_written: WrittenHook | None) -> LayerHook | None:
    """Return what the runner is to call after each layer; None if nobody wants to know."""
    if on_written is None:
        return None
    written = tuple(
        (item.sequence, item.first_token + item.num_tokens)
        for item in plan.items
        if isinstance(item.sequence, SequenceState) and item.sequence.has_destination
    )
    if not written:
        return None
    return lambda layer: on_written(layer, written)
