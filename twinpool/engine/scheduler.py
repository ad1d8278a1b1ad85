"""Which sequences a step computes, and which blocks they get: continuous batching without torch or I/O.

Knows no runner, no thread and no clock: time is handed in.

Blocks, in four rules:

- A prompt starts when all its known tokens have room (and the next one, unless it decodes elsewhere),
  so only decoding sequences grow.
- A decoding sequence that needs a block and finds none takes those of the youngest sequence that is
  younger than itself; that one waits again and recomputes.  A sequence under a transfer is never a
  victim.  If nobody younger can give, it waits: the oldest one that can run always runs.
- A waiting sequence that finds no room may be overtaken for ``OVERTAKING_S``; then the line is held
  for it.  For a preempted one, whose client already reads, the line is held at once.
- Blocks return to the pool on the way into FINISHED, or back into WAITING, and nowhere else.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from twinpool.core.errors import DeadlineExceeded, InternalError, NoFreeBlocks, ServingError
from twinpool.core.ports import BlockCounts
from twinpool.core.request import FinishReason, TokenOutput
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.config import EngineConfig
from twinpool.engine.finish import finish_reason
from twinpool.engine.plan import BatchItem, BatchPlan, ItemResult, QueueView, SchedulerPolicy, Work
from twinpool.engine.sequence import SequenceState, SequenceStatus
from twinpool.engine.sequence_blocks import SequenceBlocks
from twinpool.engine.steady import Change, events_ahead, num_growths

OVERTAKING_S = 2.0  # how long younger sequences may start before one that found no room


class StepResult(NamedTuple):
    """What one step did: the tokens it gave, the sequences it ended with an error, the items it ran."""

    outputs: tuple[tuple[SequenceState, TokenOutput], ...] = ()
    failed: tuple[tuple[SequenceState, ServingError], ...] = ()
    num_items: int = 0


class Scheduler:
    """Holds the live sequences of one engine and the books of its blocks.

    Attributes:
        counters: Totals since the start.
        pool: The blocks of all sequences; only the scheduler gives and takes them.
        next_deadline_s: No live sequence has an earlier deadline; infinite if there is none.
    """

    def __init__(
        self, config: EngineConfig, policy: SchedulerPolicy, *, num_blocks: int, eos_ids: Set[int]
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._blocks = SequenceBlocks(config, num_blocks=num_blocks, counters=self.counters)
        self.pool: BlockPool = self._blocks.pool
        self._config = config
        self._policy = policy
        self._eos_ids = frozenset(eos_ids)
        self._live: dict[int, SequenceState] = {}
        self._waiting = _Line()
        self._prefilling = _Line()
        self._decoding = _Line()
        self._lines = {
            SequenceStatus.WAITING: self._waiting,
            SequenceStatus.PREFILLING: self._prefilling,
            SequenceStatus.DECODING: self._decoding,
        }
        self.next_deadline_s = math.inf

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """All that are not FINISHED."""
        return tuple(self._live.values())

    @property
    def decoding(self) -> Sequence[SequenceState]:
        """Those that get a token a step, oldest first; to read, until the next call."""
        return self._decoding.sequences

    @property
    def num_sequences(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting.sequences)

    @property
    def has_work(self) -> bool:
        """Whether a sequence wants to be computed; it may still have to wait for blocks."""
        return bool(self._decoding.sequences or self._prefilling.sequences or self._waiting.sequences)

    def enqueue(self, sequence: SequenceState) -> None:
        """Let a new sequence wait for its first step."""
        assert sequence.status is SequenceStatus.WAITING, "only a waiting sequence can be enqueued"
        self._waiting.add(sequence)
        self._admit(sequence)

    def hold(self, sequence: SequenceState, *, now_s: float) -> None:
        """Take room for the KV of a new sequence that is computed elsewhere.

        Raises:
            NoFreeBlocks: Nothing was taken.  Blocks that older sequences wait for do not count as free.
        """
        assert sequence.status is SequenceStatus.RECEIVING, "only a receiving sequence can be held"
        self._blocks.take(sequence, spare=self._spare_of_newcomers(now_s))
        self._admit(sequence)

    def start_decoding(self, sequence: SequenceState, token_id: int) -> None:
        """Go on with a sequence whose KV arrived: RECEIVING to DECODING, ``token_id`` is its next token."""
        sequence.move_to(SequenceStatus.DECODING)
        sequence.num_computed_tokens = len(sequence.token_ids)
        self._blocks.publish(sequence)
        sequence.token_ids.append(token_id)
        sequence.has_emitted = True
        self._decoding.add(sequence)

    def end(self, sequence: SequenceState) -> None:
        """End a request that gets no more tokens; its blocks drain first if a transfer may touch them."""
        if sequence.is_over:
            return
        is_under_transfer = sequence.is_under_transfer
        self._leave_line(sequence)
        if is_under_transfer:
            self._drain(sequence)
        else:
            self._finish(sequence)

    def drained(self, sequence: SequenceState) -> None:
        """Take the blocks back of a sequence whose transfer is over, and end it if it still lived on it."""
        if not sequence.is_under_transfer:
            return
        if sequence.status is not SequenceStatus.SENDING:
            self.end(sequence)
        self._finish(sequence)

    def expire(self, now_s: float) -> tuple[tuple[SequenceState, ServingError], ...]:
        """End every sequence whose deadline passed."""
        if now_s < self.next_deadline_s:
            return ()
        expired: list[tuple[SequenceState, ServingError]] = []
        self.next_deadline_s = math.inf
        for sequence in self.sequences:
            if sequence.status is SequenceStatus.DRAINING:
                continue
            if now_s < sequence.deadline_s:
                self.next_deadline_s = min(self.next_deadline_s, sequence.deadline_s)
                continue
            message = f"{sequence.request.timeout_s:g} s are over, the sequence was {sequence.status}"
            expired.append((sequence, DeadlineExceeded(message)))
            self.counters["failed_deadline"] += 1
            self.end(sequence)
        return tuple(expired)

    def plan(self, now_s: float) -> BatchPlan:
        """Choose the next step's batch and give it blocks; empty if nothing can run now."""
        view = QueueView(
            now_s=now_s,
            waiting=tuple(self._waiting.sequences),
            prefilling=tuple(self._prefilling.sequences),
            decoding=tuple(self._decoding.sequences),
        )
        batch = _Batch(tokens_left=self._config.max_batch_tokens)
        for work in self._policy.candidates(view):
            if batch.tokens_left == 0 or len(batch.items) == self._config.max_sequences:
                break
            sequence = self._checked(work, batch)
            if sequence.number not in batch.preempted and self._make_room(sequence, now_s, batch):
                self._add(sequence, work.num_tokens, batch)
        return BatchPlan(tuple(batch.items.values()))

    def commit(self, plan: BatchPlan, results: Sequence[ItemResult]) -> StepResult:
        """Book what a step computed; nothing may have changed since ``plan`` was made."""
        assert len(results) == len(plan.items), f"{len(plan.items)} items gave {len(results)} results"
        outputs: list[tuple[SequenceState, TokenOutput]] = []
        failed: list[tuple[SequenceState, ServingError]] = []
        for item, result in zip(plan.items, results, strict=True):
            sequence = item.sequence
            assert isinstance(sequence, SequenceState), "a plan holds the scheduler's own sequences"
            error = result.error or self._book(sequence, item, result)
            if error is not None:
                self.counters["failed_step"] += 1
                self.end(sequence)
                failed.append((sequence, error))
                continue
            self._blocks.publish(sequence)
            if result.token_id is not None:
                outputs.append((sequence, self._emit(sequence, result.token_id, result)))
        return StepResult(outputs=tuple(outputs), failed=tuple(failed), num_items=len(plan.items))

    def counts(self) -> BlockCounts:
        return self.pool.counts()

    def steady_steps(self) -> int:
        """Return how many of the next steps do the same: one token of every decoding sequence, nothing else.

        0 if the next step may start, preempt or go on with a prompt.  The last of them may end sequences.
        It stays so, less what was booked, until something else than ``decode_ahead`` is called; deadlines
        are not looked at.
        """
        num_decoding = len(self._decoding.sequences)
        if not 0 < num_decoding <= min(self._config.max_sequences, self._config.max_batch_tokens):
            return 0
        if self._prefilling.sequences:
            return 0
        if self._waiting.sequences and num_decoding < self._config.max_sequences:
            return 0
        steps = min([sequence.most_tokens - len(sequence.token_ids) for sequence in self._decoding.sequences])
        room = self.pool.num_available
        most = num_decoding * (steps // self._config.block_tokens + 1)
        if most <= room or self.blocks_ahead(steps) <= room:
            return steps
        return bisect_right(range(1, steps), room, key=self.blocks_ahead)

    def decode_ahead(self, num_steps: int, token_id: int) -> tuple[SequenceState, ...]:
        """Book steady steps at once, each of which gave every decoding sequence ``token_id``.

        Leaves everything as that many calls of ``plan`` and ``commit`` do, block numbers included.

        Args:
            num_steps: At most what ``steady_steps`` says.
            token_id: Ends none of the answers.

        Returns:
            The sequences that ended by their length.
        """
        sequences = tuple(self._decoding.sequences)
        ended = (
            self._publish_ahead(sequences, num_steps, token_id)
            if self._config.prefix_cache
            else self._lengthen_ahead(sequences, num_steps, token_id)
        )
        self.counters["decoded_tokens"] += num_steps * len(sequences)
        self.counters["generated_tokens"] += num_steps * len(sequences)
        if ended:
            self.counters[f"finished_{FinishReason.LENGTH}"] += len(ended)
        return tuple(ended)

    def blocks_ahead(self, num_steps: int) -> int:
        """Return how many blocks so many steady steps take."""
        return num_growths(self._decoding.sequences, num_steps, block_tokens=self._config.block_tokens)

    def _admit(self, sequence: SequenceState) -> None:
        assert sequence.number not in self._live, f"sequence {sequence.number} is already here"
        self._live[sequence.number] = sequence
        self.next_deadline_s = min(self.next_deadline_s, sequence.deadline_s)

    def _lengthen_ahead(
        self, sequences: Sequence[SequenceState], num_steps: int, token_id: int
    ) -> list[SequenceState]:
        """Book steady steps where nothing is published; return who ended."""
        block_tokens = self._config.block_tokens
        token_ids = [token_id] * num_steps
        growths: list[tuple[int, int]] = []
        ended: list[SequenceState] = []
        for place, sequence in enumerate(sequences):
            known = len(sequence.token_ids)
            growth = len(sequence.blocks) * block_tokens - known + 1
            while growth < num_steps:
                growths.append((growth, place))
                growth += block_tokens
            sequence.token_ids += token_ids
            sequence.num_computed_tokens += num_steps
            if known + num_steps == sequence.most_tokens:
                ended.append(sequence)
        if growths:
            growths.sort()
            self._blocks.grow(*[sequences[place] for _, place in growths])
        for sequence in ended:
            self.end(sequence)
        return ended

    def _publish_ahead(
        self, sequences: Sequence[SequenceState], num_steps: int, token_id: int
    ) -> list[SequenceState]:
        """Book steady steps in which full blocks are published; return who ended."""
        known = [len(sequence.token_ids) for sequence in sequences]
        ended: list[SequenceState] = []
        events = events_ahead(sequences, num_steps, block_tokens=self._config.block_tokens)
        for step, _, place, change in events:
            sequence = sequences[place]
            if change is Change.GROW:
                self._blocks.grow(sequence)
            elif change is Change.FILL:
                sequence.lengthen(known[place] + step, token_id, num_computed=known[place] + step)
                self._blocks.publish(sequence)
            else:
                ended.append(sequence)
                sequence.lengthen(known[place] + num_steps, token_id, num_computed=known[place] + step)
                self.end(sequence)
        for sequence, num_known in zip(sequences, known, strict=True):
            num_tokens = num_known + num_steps
            sequence.lengthen(num_tokens, token_id, num_computed=num_tokens - 1)
        return ended

    def _leave_line(self, sequence: SequenceState) -> None:
        line = self._lines.get(sequence.status)
        if line is not None:
            line.remove(sequence)

    def _drain(self, sequence: SequenceState) -> None:
        sequence.move_to(SequenceStatus.DRAINING)
        self._blocks.drain(sequence)

    def _finish(self, sequence: SequenceState) -> None:
        sequence.move_to(SequenceStatus.FINISHED)
        self._blocks.release(sequence)
        del self._live[sequence.number]

    def _checked(self, work: Work, batch: _Batch) -> SequenceState:
        """Return the offered sequence; an offer that breaks the policy's contract is a bug."""
        sequence = work.sequence
        assert isinstance(sequence, SequenceState), "a policy offers sequences of its view"
        assert self._live.get(sequence.number) is sequence, "a policy offers sequences of its view"
        assert sequence.status in self._lines, f"the policy offered a sequence that is {sequence.status}"
        assert sequence.number not in batch.offered, "the policy offered a sequence twice"
        assert 1 <= work.num_tokens <= sequence.num_uncomputed_tokens, (
            f"the policy offered {work.num_tokens} of {sequence.num_uncomputed_tokens} tokens"
        )
        batch.offered.add(sequence.number)
        return sequence

    def _make_room(self, sequence: SequenceState, now_s: float, batch: _Batch) -> bool:
        if sequence.status is SequenceStatus.DECODING:
            return self._grow(sequence, batch)
        return sequence.status is SequenceStatus.PREFILLING or self._start(sequence, now_s, batch)

    def _add(self, sequence: SequenceState, num_tokens: int, batch: _Batch) -> None:
        num_uncomputed = sequence.num_uncomputed_tokens
        num_tokens = min(num_tokens, batch.tokens_left, num_uncomputed)
        if sequence.status is SequenceStatus.PREFILLING and self._config.max_chunk_tokens:
            num_tokens = min(num_tokens, self._config.max_chunk_tokens)
        batch.tokens_left -= num_tokens
        batch.items[sequence.number] = BatchItem(
            sequence=sequence,
            first_token=sequence.num_computed_tokens,
            num_tokens=num_tokens,
            samples=num_tokens == num_uncomputed,
        )

    def _start(self, sequence: SequenceState, now_s: float, batch: _Batch) -> bool:
        """Give a waiting sequence all its blocks, if its turn has come and they are free."""
        num_started = len(self._prefilling.sequences) + len(self._decoding.sequences)
        if num_started >= self._config.max_sequences:
            return False
        if self._line_holder(now_s) not in (None, sequence):
            return False
        try:
            self._blocks.take(sequence, spare=self._headroom(sequence, batch))
        except NoFreeBlocks:
            if sequence.blocked_since_s is None:
                sequence.blocked_since_s = now_s
            return False
        self._waiting.remove(sequence)
        sequence.move_to(SequenceStatus.PREFILLING)
        sequence.blocked_since_s = None
        self._prefilling.add(sequence)
        return True

    def _line_holder(self, now_s: float) -> SequenceState | None:
        """Return the oldest waiting sequence if nobody may overtake it any more."""
        head = self._waiting.head
        if head is None:
            return None
        if head.num_preemptions or (
            head.blocked_since_s is not None and now_s - head.blocked_since_s >= OVERTAKING_S
        ):
            return head
        return None

    def _headroom(self, sequence: SequenceState, batch: _Batch | None = None) -> int:
        """Return how many blocks must stay free when ``sequence`` starts.

        Those that decoding sequences need in this very step, since they would preempt it at once.  For
        one that was preempted twice, all that older ones can ever take, so that it is not a victim of
        those again: recomputing must not repeat for ever.
        """
        if sequence.num_preemptions < 2:
            if batch is None:
                return self._num_growing()
            if batch.num_growing is None:
                batch.num_growing = self._num_growing()
            return batch.num_growing
        older = (other for line in (self._prefilling, self._decoding) for other in line)
        return sum(
            self._blocks.num_blocks(other.request.max_total_tokens) - len(other.blocks)
            for other in older
            if other.number < sequence.number and not other.has_destination
        )

    def _num_growing(self) -> int:
        return sum(map(self._blocks.needs_block, self._decoding.sequences))

    def _spare_of_newcomers(self, now_s: float) -> int:
        """Return how many blocks a reservation must leave to those that were here before."""
        spare = self._num_growing()
        holder = self._line_holder(now_s)
        if holder is not None:
            spare += self._blocks.num_blocks(holder.num_start_tokens) + self._headroom(holder)
        return spare

    def _grow(self, sequence: SequenceState, batch: _Batch) -> bool:
        """Give a decoding sequence the block of its next token, from a younger sequence if none is free."""
        if not self._blocks.needs_block(sequence):
            return True
        while self.pool.num_available == 0:
            victim = self._youngest_preemptible()
            if victim is None or victim.number <= sequence.number:
                return False
            self._preempt(victim, batch)
        self._blocks.grow(sequence)
        return True

    def _youngest_preemptible(self) -> SequenceState | None:
        prefilling = next(
            (sequence for sequence in reversed(self._prefilling) if sequence.is_preemptible), None
        )
        decoding = next(reversed(self._decoding), None)
        if prefilling is None or decoding is None:
            return prefilling or decoding
        return max(prefilling, decoding, key=_by_number)

    def _preempt(self, sequence: SequenceState, batch: _Batch) -> None:
        """Take a sequence's blocks; it recomputes prompt and output later and goes on where it was."""
        self._leave_line(sequence)
        sequence.move_to(SequenceStatus.WAITING)
        self._blocks.release(sequence)
        self._waiting.add(sequence)
        self.counters["preemptions"] += 1
        self.counters["preempted_tokens"] += sequence.num_computed_tokens
        sequence.num_preemptions += 1
        sequence.num_computed_tokens = 0
        sequence.prompt_logprobs = [None]
        batch.preempted.add(sequence.number)
        item = batch.items.pop(sequence.number, None)
        if item is not None:
            batch.tokens_left += item.num_tokens

    def _book(self, sequence: SequenceState, item: BatchItem, result: ItemResult) -> InternalError | None:
        """Count the computed tokens; return an error if the runner gave something else than the item asks."""
        is_prefill = sequence.status is SequenceStatus.PREFILLING
        self.counters["prefilled_tokens" if is_prefill else "decoded_tokens"] += item.num_tokens
        sequence.num_computed_tokens += item.num_tokens
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs.extend(result.prompt_logprobs)
            num_logprobs = len(sequence.prompt_logprobs)
            if item.samples and num_logprobs != sequence.num_prompt_tokens:
                return InternalError(
                    f"{num_logprobs} logprobs for {sequence.num_prompt_tokens} prompt tokens"
                )
        if (result.token_id is not None) != item.samples:
            return InternalError("an item that samples gave no token, or one that does not gave one")
        return None

    def _emit(self, sequence: SequenceState, token_id: int, result: ItemResult) -> TokenOutput:
        """Append a chosen token and move the sequence on."""
        index = sequence.num_output_tokens
        sampling = sequence.request.sampling
        finish = finish_reason(
            token_id, num_output_tokens=index + 1, sampling=sampling, eos_ids=self._eos_ids
        )
        output = TokenOutput(
            index=index,
            token_id=token_id,
            finish=finish,
            logprob=result.logprob,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if sequence.wants_prompt_logprobs else None,
            cached_tokens=(
                0 if sequence.has_emitted else min(sequence.num_cached_tokens, sequence.num_prompt_tokens)
            ),
        )
        sequence.token_ids.append(token_id)
        sequence.has_emitted = True
        self.counters["generated_tokens"] += 1
        if finish is not None:
            self.counters[f"finished_{finish}"] += 1
            self.end(sequence)
        elif sequence.has_destination:
            self._leave_line(sequence)
            sequence.move_to(SequenceStatus.SENDING)
        elif sequence.status is SequenceStatus.PREFILLING:
            self._leave_line(sequence)
            sequence.move_to(SequenceStatus.DECODING)
            self._decoding.add(sequence)
        return output


@dataclass(slots=True)
class _Batch:
    """A step while it is being planned."""

    tokens_left: int
    items: dict[int, BatchItem] = field(default_factory=dict)  # by number; taken out again on preemption
    offered: set[int] = field(default_factory=set)
    preempted: set[int] = field(default_factory=set)  # these do not start again in the same step
    num_growing: int | None = None  # of Scheduler._num_growing, counted when first needed


_by_number = attrgetter("number")


class _Line:
    """Sequences in order of arrival.

    Attributes:
        sequences: Them all; to read, until the line changes.
    """

    __slots__ = ("sequences",)

    def __init__(self) -> None:
        self.sequences: list[SequenceState] = []

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self.sequences)

    def __reversed__(self) -> Iterator[SequenceState]:
        return reversed(self.sequences)

    @property
    def head(self) -> SequenceState | None:
        return self.sequences[0] if self.sequences else None

    def add(self, sequence: SequenceState) -> None:
        if self.sequences and self.sequences[-1].number > sequence.number:
            insort(self.sequences, sequence, key=_by_number)
        else:
            self.sequences.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        place = bisect_left(self.sequences, sequence.number, key=_by_number)
        assert self.sequences[place] is sequence, "a sequence is not in its line"
        del self.sequences[place]
