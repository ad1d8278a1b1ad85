"""An engine with a fake runner and a manual clock, and everything that must hold after each event."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from tests import toys
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner, expected_output, next_token
from twinpool.core.clock import ManualClock
from twinpool.core.errors import DeadlineExceeded, ServingError
from twinpool.core.ports import BlockCounts
from twinpool.core.request import Request, TokenOutput
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.plan import BatchPlan
from twinpool.engine.prefix_cache import PrefixCache
from twinpool.engine.scheduler import StepResult
from twinpool.engine.sequence import SequenceState, SequenceStatus

UNDER_TRANSFER = (SequenceStatus.SENDING, SequenceStatus.RECEIVING, SequenceStatus.DRAINING)


def prompt(num_tokens: int, *, request_id: str = "r0", max_tokens: int = 4, **sampling: Any) -> Request:
    """A request of different tokens; the prompts of two ids have no prefix in common."""
    start = crc32(request_id.encode())
    return toys.request(
        tuple(1 + (start + i) % 90 for i in range(num_tokens)),
        request_id=request_id,
        max_tokens=max_tokens,
        **sampling,
    )


def engine(
    runner: FakeRunner,
    *,
    clock: ManualClock | None = None,
    num_blocks: int = 8,
    block_tokens: int = 4,
    max_model_tokens: int = 4096,
    eos_ids: frozenset[int] = frozenset(),
    **config: Any,
) -> Engine:
    """An engine with a pool of 8 blocks of 4 tokens; ``config`` overrides fields of EngineConfig."""
    return Engine(
        runner,
        config=EngineConfig(block_tokens=block_tokens, **config),
        limits=EngineLimits(
            num_blocks=num_blocks,
            max_model_tokens=max_model_tokens,
            vocab_size=VOCAB_SIZE,
            eos_ids=eos_ids,
        ),
        clock=clock or ManualClock(),
    )


def nothing_is_held(counts: BlockCounts) -> bool:
    """Whether no block has an owner; the cached ones keep what they hold."""
    return counts.owned == counts.draining == 0 and counts.free + counts.cached == counts.total


@dataclass
class Life:
    """One request's story as its client and its transfer see it."""

    sequence: SequenceState
    expected: list[int]
    outputs: list[TokenOutput] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    transfer_blocks: list[int] | None = None  # a transfer may touch these until it is drained
    first_sent: int = 0  # tokens before this one are not touched: they were there
    was_received: bool = False


class World:
    """Drives an engine, plays its transfers and checks it after every event."""

    def __init__(self, *, num_blocks: int, block_tokens: int, eos_ids: frozenset[int], **config: Any) -> None:
        self.clock = ManualClock()
        self.runner = FakeRunner(block_tokens=block_tokens, before_step=self._check_plan)
        self.engine = engine(
            self.runner,
            clock=self.clock,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            eos_ids=eos_ids,
            **config,
        )
        self.lives: list[Life] = []
        self.refused = 0
        self._block_tokens = block_tokens
        self._eos_ids = eos_ids

    def submit(self, request: Request, *, has_destination: bool = False) -> None:
        try:
            sequence = self.engine.submit(request, has_destination=has_destination)
        except ServingError:
            self.refused += 1
        else:
            self.lives.append(Life(sequence, expected_output(request, eos_ids=self._eos_ids)))
        self.check()

    def reserve(self, request: Request) -> None:
        before = self.engine.counts()
        try:
            sequence = self.engine.reserve(request)
        except ServingError:
            self.refused += 1
            assert self.engine.counts() == before, "a refused reservation took blocks"
        else:
            life = Life(sequence, expected_output(request, eos_ids=self._eos_ids)[1:])
            life.transfer_blocks = list(sequence.blocks)
            life.first_sent = sequence.num_cached_tokens
            life.was_received = True
            self.lives.append(life)
        self.check()

    def arrive(self, life: Life) -> None:
        """Finish the transfer of a receiving sequence, unless its first token is also its last."""
        sequence = life.sequence
        if sequence.status is not SequenceStatus.RECEIVING:
            return
        if not life.expected:
            self.abort(life)
            return
        request = sequence.request
        self.runner.fill(sequence.blocks, sequence.token_ids, first_token=life.first_sent)
        first = TokenOutput(index=len(request.output_ids), token_id=next_token(sequence.token_ids))
        self.engine.arrived(sequence, first)
        life.transfer_blocks = None
        self.check()

    def abort(self, life: Life) -> None:
        self.engine.abort(life.sequence)
        if not life.ends:  # one that was sent has ended for its client
            life.ends.append("aborted")
        self.check()

    def drain(self, life: Life) -> None:
        """End the transfer of a sequence that is sending or draining."""
        if life.sequence.status in (SequenceStatus.SENDING, SequenceStatus.DRAINING):
            life.transfer_blocks = None
            self.engine.drained(life.sequence)
        self.check()

    def scribble(self, life: Life) -> None:
        """Let a late sender write into what it still may write into."""
        if life.was_received and life.transfer_blocks is not None:
            room = len(life.transfer_blocks) * self._block_tokens
            self.runner.fill(life.transfer_blocks, [VOCAB_SIZE - 1] * room, first_token=life.first_sent)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def step(self) -> StepResult:
        result = self.engine.step()
        by_sequence = {life.sequence: life for life in self.lives}
        for sequence, output in result.outputs:
            life = by_sequence[sequence]
            assert not life.ends, "a token came after the end"
            life.outputs.append(output)
            if output.finish is not None or sequence.has_destination:
                life.ends.append(output.finish or "sent")
            if sequence.has_destination:
                life.transfer_blocks = list(sequence.blocks)
        for sequence, error in result.failed:
            assert isinstance(error, DeadlineExceeded), f"a step failed: {error}"
            life = by_sequence[sequence]
            if life.ends != ["sent"]:  # one that was sent may still be late
                life.ends.append(type(error).__name__)
        if result.num_items == 0 and self.engine.has_work:
            assert any(s.status in UNDER_TRANSFER for s in self.engine.sequences), (
                "nothing runs, nothing blocks"
            )
        self.check()
        return result

    def run_out(self) -> None:
        """End all transfers and run until nothing is left."""
        for _ in range(20_000):
            for life in self.lives:
                self.arrive(life)
                self.drain(life)
            self.step()
            if self.engine.num_sequences == 0:
                break
        self.check_ends()

    def check(self) -> None:
        """Assert what must hold between two events."""
        counts = self.engine.counts()
        assert counts.free + counts.owned + counts.cached + counts.draining == counts.total
        sequences = self.engine.sequences
        held = {block for s in sequences for block in s.blocks}
        in_use = {block for s in sequences if s.status is not SequenceStatus.DRAINING for block in s.blocks}
        assert (len(in_use), len(held - in_use)) == (counts.owned, counts.draining)
        self._check_contents(held, counts)
        for sequence in sequences:
            self._check_kv(sequence)
            room = len(sequence.blocks) * self._block_tokens
            assert room >= sequence.num_computed_tokens, "computed tokens without a block"
            if sequence.status in (SequenceStatus.PREFILLING, SequenceStatus.RECEIVING):
                assert room >= sequence.num_start_tokens, "a prompt started without all its room"
            assert (sequence.status is SequenceStatus.WAITING) == (not sequence.blocks)
        for life in self.lives:
            if sequence_is_live(life.sequence):
                assert not life.ends or life.ends == ["sent"], "a live sequence has ended"
            else:
                assert len(life.ends) == 1, f"a request ended as {life.ends}"
            if life.transfer_blocks is not None and not life.was_received and life.sequence.blocks:
                num_tokens = life.sequence.request.num_tokens
                kv = self.runner.read(life.transfer_blocks, num_tokens)
                assert kv == life.sequence.token_ids[:num_tokens], "KV changed under a transfer"

    def _check_contents(self, held: set[int], counts: BlockCounts) -> None:
        """Assert that a block that can be found holds what its name says, and can be reached."""
        prefixes = contents_of(self.engine)
        findable = prefixes._by_block
        assert len(findable.keys() - held) == counts.cached, (
            "a block without owner is cached if it can be found"
        )
        for block, entry in findable.items():
            ids = self.runner.read([block], self._block_tokens)
            assert array("I", ids).tobytes() == entry.name.tokens, (
                "a block holds something else than its name"
            )
            assert entry.parent is None or entry.parent.blocks, "a block has outlived the one before it"

    def _check_kv(self, sequence: SequenceState) -> None:
        """Assert that a sequence has the KV of its own tokens, from its own tenant, wherever it came from."""
        num_tokens = sequence.num_computed_tokens
        if sequence.status is SequenceStatus.RECEIVING:
            num_tokens = sequence.num_cached_tokens
        if sequence.status is not SequenceStatus.DRAINING:
            kv = self.runner.read(sequence.blocks, num_tokens)
            assert kv == sequence.token_ids[:num_tokens], "a sequence has somebody else's KV"
        findable = contents_of(self.engine)._by_block
        salts = {findable[block].name.salt for block in sequence.blocks if block in findable}
        assert salts <= {sequence.request.cache_salt}, "a block of another tenant is shared"

    def _check_plan(self, plan: BatchPlan) -> None:
        """Assert that a step writes into blocks that nobody else has or can find."""
        shared = contents_of(self.engine)._by_block.keys()
        for item in plan.items:
            first = item.first_token // self._block_tokens
            written = set(item.sequence.blocks[first:])
            assert not written & shared, "a step writes into a block that can be found"
            for other in self.engine.sequences:
                if other is not item.sequence:
                    assert not written & set(other.blocks), "a step writes into another sequence's block"

    def check_ends(self) -> None:
        """Assert what must hold when nothing is left."""
        assert nothing_is_held(self.engine.counts()), "blocks leaked"
        for life in self.lives:
            tokens = [output.token_id for output in life.outputs]
            if life.ends in (["stop"], ["length"]):
                assert tokens == life.expected, "an answer differs from the undisturbed one"
            assert tokens == life.expected[: len(tokens)]
            first = len(life.sequence.request.output_ids) + life.was_received
            assert [output.index for output in life.outputs] == list(range(first, first + len(tokens)))
            wants_logprobs = life.sequence.request.sampling.num_prompt_logprobs is not None
            for place, output in enumerate(life.outputs):
                has_logprobs = wants_logprobs and place == 0 and not life.was_received
                assert (output.prompt_logprobs is not None) == has_logprobs
                if output.prompt_logprobs is not None:
                    ids = [entry and entry.token_id for entry in output.prompt_logprobs]
                    assert ids == [None, *life.sequence.request.prompt_ids[1:]]


def contents_of(engine: Engine) -> PrefixCache:
    """The table of what an engine's blocks hold."""
    return engine._scheduler._blocks._prefixes


def sequence_is_live(sequence: SequenceState) -> bool:
    """Whether the request is not over yet."""
    return sequence.status not in (SequenceStatus.DRAINING, SequenceStatus.FINISHED)
