"""Step times as two public simulators count them, mistakes included; only to replay their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twinpool.lab.profile.cost import Chunk, CostModel, DecodeLine, line_s
from twinpool.lab.simulate.config import Emulate
from twinpool.lab.workload.item import WorkItem


class SplitwiseSimCost:
    """A step of prompts costs what they cost; decodes in it add a tenth, however many there are.

    Source:
        ``performance_model.py`` of splitwise-sim at 8f99e7d.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def step_s(self, prompts: Sequence[Chunk], num_decodes: int, context_tokens: int) -> float:
        if not prompts or not num_decodes:
            return self._cost.step_s(prompts, num_decodes, context_tokens)
        one_batch = [*prompts, Chunk(0, num_decodes)]
        return 1.1 * self._cost.step_s(one_batch, 0, 0)

    def decode_line(self, num_decodes: int, context_tokens: int) -> DecodeLine:
        return self._cost.decode_line(num_decodes, context_tokens)


class SimDistServeCost:
    """Adds what simdistserve adds to each step: a constant, a stage, and 0.1 us a token.

    Decodes are charged for one token more than the context, the overhead for the context.

    Source:
        ``worker.py`` of simdistserve in LLMServe/DistServe at 82831f1.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def step_s(self, prompts: Sequence[Chunk], num_decodes: int, context_tokens: int) -> float:
        if not prompts:
            return line_s(self.decode_line(num_decodes, context_tokens), context_tokens)
        num_tokens = sum(chunk.num_tokens for chunk in prompts)
        return self._cost.step_s(prompts, num_decodes, context_tokens) + 3e-3 + 1e-7 * num_tokens

    def decode_line(self, num_decodes: int, context_tokens: int) -> DecodeLine:
        base_s, per_token_s, end = self._cost.decode_line(num_decodes, context_tokens)
        return DecodeLine(base_s + 2e-3 - 1e-7 * num_decodes, per_token_s + 1e-7, end)


def emulated_cost(cost: CostModel, emulate: Emulate | None) -> CostModel:
    """Return the step times as ``emulate`` has them."""
    if emulate is Emulate.SPLITWISE_SIM:
        return SplitwiseSimCost(cost)
    return SimDistServeCost(cost) if emulate is Emulate.SIMDISTSERVE else cost


def emulated_item(item: WorkItem, emulate: Emulate | None) -> WorkItem:
    """Return the request as ``emulate`` has it: simdistserve decodes a token more than asked."""
    if emulate is Emulate.SIMDISTSERVE:
        return replace(item, output_tokens=item.output_tokens + 1)
    return item
