"""A runner without a model: the next token is a function of all tokens before it.

Any test of scheduler, engine, loop or services may use it.  It keeps a cache of its own, slot by slot as
a real one would, and reads a sequence back through its blocks before it chooses a token.  So a block
with two owners, a missing block or a token computed twice in the wrong place changes the answer or
fails an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinpool.core.errors import ServingError
from twinpool.core.request import Request, TokenLogprob
from twinpool.engine.plan import BatchItem, BatchPlan, ItemResult, LayerHook

VOCAB_SIZE = 97


def next_token(token_ids: Sequence[int]) -> int:
    """Return the token that follows ``token_ids``: below VOCAB_SIZE, and different for most prefixes."""
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % 1_000_003
    return value % VOCAB_SIZE


def expected_output(request: Request, *, eos_ids: frozenset[int] = frozenset()) -> list[int]:
    """Return the answer an undisturbed run gives after ``request.output_ids``."""
    token_ids = [*request.prompt_ids, *request.output_ids]
    sampling = request.sampling
    for count in range(len(request.output_ids) + 1, sampling.max_tokens + 1):
        token_ids.append(next_token(token_ids))
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        if token_ids[-1] in stops and count >= sampling.min_tokens:
            break
    return token_ids[request.num_tokens :]


class FakeRunner:
    """Implements ``plan.Runner``.

    Args:
        block_tokens: As the engine's.
        num_layers: How often ``on_layer`` is called in a step.
        before_step: Called first with each plan; may sleep, raise or look.
        item_errors: By request id, the error its item gets.

    Attributes:
        plans: Every plan, in order.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        num_layers: int = 2,
        before_step: Callable[[BatchPlan], None] | None = None,
        item_errors: dict[str, ServingError] | None = None,
    ) -> None:
        self.plans: list[BatchPlan] = []
        self._block_tokens = block_tokens
        self._num_layers = num_layers
        self._before_step = before_step
        self._item_errors = item_errors or {}
        self._slots: dict[tuple[int, int], int] = {}  # (block, place in it) -> token id

    def run(self, plan: BatchPlan, on_layer: LayerHook | None) -> tuple[ItemResult, ...]:
        self.plans.append(plan)
        if self._before_step is not None:
            self._before_step(plan)
        for item in plan.items:
            self._write(item)
        for layer in range(self._num_layers):
            if on_layer is not None:
                on_layer(layer)
        return tuple(self._result(item) for item in plan.items)

    def fill(self, blocks: Sequence[int], token_ids: Sequence[int], *, first_token: int = 0) -> None:
        """Store the KV of ``token_ids`` from ``first_token`` on in ``blocks``, as a transfer would."""
        for position in range(first_token, len(token_ids)):
            self._slots[self._slot(blocks, position)] = token_ids[position]

    def read(self, blocks: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens whose KV is stored in ``blocks``."""
        return [self._slots[self._slot(blocks, position)] for position in range(num_tokens)]

    def _write(self, item: BatchItem) -> None:
        sequence = item.sequence
        assert item.first_token == sequence.num_computed_tokens, "a token is skipped or computed twice"
        for position in range(item.first_token, item.first_token + item.num_tokens):
            self._slots[self._slot(sequence.blocks, position)] = sequence.token_ids[position]

    def _result(self, item: BatchItem) -> ItemResult:
        request = item.sequence.request
        if request.request_id in self._item_errors:
            return ItemResult(error=self._item_errors[request.request_id])
        end = item.first_token + item.num_tokens
        cached = self.read(item.sequence.blocks, end)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if request.sampling.num_prompt_logprobs is not None:
            prompt_logprobs = tuple(
                TokenLogprob(request.prompt_ids[position], -float(position), 1)
                for position in range(item.first_token + 1, min(end + 1, item.sequence.num_prompt_tokens))
            )
        return ItemResult(
            token_id=next_token(cached) if item.samples else None, prompt_logprobs=prompt_logprobs
        )

    def _slot(self, blocks: Sequence[int], position: int) -> tuple[int, int]:
        return blocks[position // self._block_tokens], position % self._block_tokens
