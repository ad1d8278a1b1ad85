"""One sequence in an engine: its request, its tokens, its blocks, and where it stands in its life.

    submit  -> WAITING -> PREFILLING --(no destination)--> DECODING -> FINISHED
                  ^           |  |                             |
                  `-preempted-'  |                             `- preempted: back to WAITING
                                 `--(destination)--> SENDING -> FINISHED
                                                        `- aborted -> DRAINING -> FINISHED
    reserve -> RECEIVING --(KV arrived)--> DECODING
                   `- aborted, or lease over -> DRAINING -> FINISHED

Knows nothing of other sequences; only the scheduler changes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.core.request import Request, TokenLogprob
from twinpool.engine.prefix_cache import BlockName


class SequenceStatus(StrEnum):
    """Where a sequence stands; who may touch its blocks follows from it."""

    WAITING = "waiting"  # has no block
    PREFILLING = "prefilling"  # has all blocks of its known tokens; with a destination they are read
    SENDING = "sending"  # its token is out, a transfer still reads its blocks
    RECEIVING = "receiving"  # a transfer writes its blocks
    DECODING = "decoding"  # one token a step; the only status in which a sequence grows
    DRAINING = "draining"  # over, but a transfer may still touch its blocks
    FINISHED = "finished"  # has no block


LEGAL_MOVES: Mapping[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.PREFILLING, SequenceStatus.FINISHED}),
    SequenceStatus.PREFILLING: frozenset(
        {
            SequenceStatus.DECODING,
            SequenceStatus.SENDING,
            SequenceStatus.WAITING,
            SequenceStatus.DRAINING,
            SequenceStatus.FINISHED,
        }
    ),
    SequenceStatus.SENDING: frozenset({SequenceStatus.DRAINING, SequenceStatus.FINISHED}),
    SequenceStatus.RECEIVING: frozenset({SequenceStatus.DECODING, SequenceStatus.DRAINING}),
    SequenceStatus.DECODING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.DRAINING: frozenset({SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


_UNDER_TRANSFER = frozenset({SequenceStatus.SENDING, SequenceStatus.RECEIVING, SequenceStatus.DRAINING})
_OVER = frozenset({SequenceStatus.DRAINING, SequenceStatus.FINISHED})


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """One sequence; satisfies ``plan.SequenceView`` for policies and runners.

    Attributes:
        number: Place in the order of arrival; unique in one engine and never used again.
        token_ids: Prompt, then output so far; the last one of a decoding sequence has no KV yet.
        blocks: Numbers of the blocks it owns, by token position.
        block_names: What its full blocks hold, as far as somebody asked.
        num_published_blocks: The first blocks, which others may find; it writes only behind them.
        num_cached_tokens: Tokens whose KV it found at its first start.
        prompt_logprobs: What the first output will carry; entry 0 is None.
        has_emitted: An output of this attempt was given out.
        blocked_since_s: When it was first refused a start for want of blocks.
    """

    number: int
    request: Request
    arrived_s: float
    has_destination: bool = False
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)
    most_tokens: int = field(init=False)  # prompt and answer together, if nothing ends it before
    deadline_s: float = field(init=False)
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    block_names: list[BlockName] = field(default_factory=list)
    num_published_blocks: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    has_emitted: bool = False
    num_preemptions: int = 0
    blocked_since_s: float | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        self.most_tokens = request.max_total_tokens + 1
        self.deadline_s = self.arrived_s + request.timeout_s

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far, those of earlier attempts included."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_tokens_left(self) -> int:
        """Tokens of the answer that may still be chosen."""
        return self.most_tokens - len(self.token_ids)

    @property
    def num_start_tokens(self) -> int:
        """Tokens it needs room for at its start: the known ones, and the next unless it decodes elsewhere."""
        if self.has_destination:
            return len(self.token_ids)
        return min(len(self.token_ids) + 1, self.most_tokens - 1)

    @property
    def is_under_transfer(self) -> bool:
        """Whether a transfer may touch its blocks now."""
        if self.status is SequenceStatus.PREFILLING:
            return self.has_destination
        return self.status in _UNDER_TRANSFER

    @property
    def is_over(self) -> bool:
        """Whether it gets no more tokens."""
        return self.status in _OVER

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every position of the prompt must be computed for its first output."""
        return self.request.sampling.num_prompt_logprobs is not None and not self.has_emitted

    @property
    def is_preemptible(self) -> bool:
        """Whether its blocks can be taken away and computed again later."""
        if self.status is SequenceStatus.PREFILLING:
            return not self.has_destination
        return self.status is SequenceStatus.DECODING

    def lengthen(self, num_tokens: int, token_id: int, *, num_computed: int) -> None:
        """Let it have ``num_tokens`` tokens, of which the new ones are all ``token_id``."""
        self.token_ids.extend([token_id] * (num_tokens - len(self.token_ids)))
        self.num_computed_tokens = num_computed

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status; a move that is not in ``LEGAL_MOVES`` is a bug."""
        assert status in LEGAL_MOVES[self.status], f"{self.status} -> {status} is no legal move"
        self.status = status
