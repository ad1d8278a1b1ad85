"""A runner that computes nothing: it says how long the batch would have taken."""

from __future__ import annotations

from typing import NamedTuple

from twinpool.engine.plan import BatchPlan, ItemResult, LayerHook, SequenceView
from twinpool.lab.profile.cost import Chunk, CostModel

TOKEN = 0  # every token of every answer
_SAMPLED, _NOT_SAMPLED = ItemResult(token_id=TOKEN), ItemResult()


class Prompt(NamedTuple):
    """A part of a prompt that a step computes."""

    sequence: SequenceView
    end_token: int  # tokens of it whose KV is there after the step
    is_last: bool


class CostRunner:
    """Implements ``plan.Runner``.

    Args:
        cost: Of the worker.

    Attributes:
        step_s: How long the latest batch takes.
        prompts: The parts of prompts in it.
    """

    def __init__(self, cost: CostModel) -> None:
        self.step_s = 0.0
        self.prompts: list[Prompt] = []
        self._cost = cost

    def run(self, plan: BatchPlan, on_layer: LayerHook | None) -> tuple[ItemResult, ...]:
        chunks: list[Chunk] = []
        prompts: list[Prompt] = []
        results: list[ItemResult] = []
        num_decodes = context_tokens = 0
        for sequence, first_token, num_tokens, samples in plan.items:
            results.append(_SAMPLED if samples else _NOT_SAMPLED)
            if num_tokens == 1 and first_token >= sequence.num_prompt_tokens:
                num_decodes += 1
                context_tokens += first_token + 1
            else:
                chunks.append(Chunk(first_token, num_tokens))
                prompts.append(Prompt(sequence, first_token + num_tokens, samples))
        self.prompts = prompts
        self.step_s = self._cost.step_s(chunks, num_decodes, context_tokens)
        return tuple(results)
