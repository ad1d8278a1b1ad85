"""What one engine step computes: the words between policy, scheduler and runner.

Knows nothing of torch, so that a test runs the same scheduler with another runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twinpool.core.errors import ServingError
from twinpool.core.request import Request, TokenLogprob

LayerHook = Callable[[int], None]
"""Called with a layer's index once the KV of the whole batch in that layer is in the cache."""


class SequenceView(Protocol):
    """A sequence as policies and runners may see it: everything to read, nothing to change."""

    @property
    def request(self) -> Request: ...

    @property
    def arrived_s(self) -> float: ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt, then output so far."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the request's own prompt; everything after it is output."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache."""
        ...

    @property
    def num_uncomputed_tokens(self) -> int: ...

    @property
    def blocks(self) -> Sequence[int]: ...

    @property
    def has_destination(self) -> bool:
        """Whether its KV is sent to another worker as it is computed."""
        ...


class Work(NamedTuple):
    """A policy's offer: compute up to ``num_tokens`` more tokens of ``sequence``."""

    sequence: SequenceView
    num_tokens: int


class QueueView(NamedTuple):
    """What a policy may look at; each sequence is in one of the three, oldest first."""

    now_s: float
    waiting: Sequence[SequenceView]  # no block yet
    prefilling: Sequence[SequenceView]  # prompt partly computed
    decoding: Sequence[SequenceView]  # one token a step


class SchedulerPolicy(Protocol):
    """Offers work in order of preference; the scheduler takes what fits.

    ``candidates`` is called once per step.  It may look at everything in ``view`` and change nothing.
    Offering a sequence twice, or more tokens than it has left, is a bug that the scheduler reports.
    Prompts that are not offered wait.  Every decoding sequence that the batch has room for is offered, in the
    order of the view: steps in which nothing else can happen are all alike.
    """

    def candidates(self, view: QueueView) -> Iterator[Work]: ...


class BatchItem(NamedTuple):
    """Tokens ``[first_token, first_token + num_tokens)`` of one sequence; their blocks are allocated."""

    sequence: SequenceView
    first_token: int
    num_tokens: int
    samples: bool  # the last of these tokens is the last known one: choose the next


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step's batch; a sequence is in at most one item."""

    items: tuple[BatchItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """What became of one item, in the plan's order."""

    token_id: int | None = None  # set if the item samples and did not fail
    logprob: TokenLogprob | None = None  # if asked for
    # One per computed token that another prompt token follows, if prompt log-probabilities were asked for:
    # entry i is about token first_token + i + 1.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: ServingError | None = None  # this sequence ends; the others go on


class Runner(Protocol):
    """Computes a batch."""

    def run(self, plan: BatchPlan, on_layer: LayerHook | None) -> tuple[ItemResult, ...]:
        """Write the KV of every item, layer by layer, and choose the next token where an item samples.

        Whatever it raises ends the sequences of this batch, and RankLost ends the worker.
        """
        ...
