"""The steps that are measured, and how long they took.

Most make the profile.  A few are checks: steps between those, or of prompts and decodes together, which the
profile is not made of, so that what it says of them is a prediction.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from twinpool.lab.calibrate.config import CalibrateConfig
from twinpool.lab.profile.cost import Chunk, CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step: prompts of ``tokens`` new ones after ``cached`` ones, beside sequences that decode."""

    prompts: int = 0
    tokens: int = 0  # of each prompt
    cached: int = 0  # of each prompt
    decodes: int = 0
    context: int = 0  # to which each decode attends, itself included
    is_check: bool = False

    @property
    def name(self) -> str:
        """As in ``2 x 128 tokens after 256 + 4 decodes at 256``."""
        after = f" after {self.cached}" if self.cached else ""
        parts = [f"{self.prompts} x {self.tokens} tokens{after}"] if self.prompts else []
        parts += [f"{self.decodes} decodes at {self.context}"] if self.decodes else []
        return " + ".join(parts)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the step needs or makes."""
        return self.prompts * (self.cached + self.tokens) + self.decodes * self.context

    def predicted_s(self, cost: CostModel) -> float:
        """Return what ``cost`` says of it."""
        chunks = [Chunk(self.cached, self.tokens)] * self.prompts
        return cost.step_s(chunks, self.decodes, self.decodes * self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """A step and each time it was measured."""

    point: StepPoint
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The middle half of the times, as a share of the median; 0 of a single one."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_s

    def error(self, cost: CostModel) -> float:
        """Return predicted / measured - 1."""
        return self.point.predicted_s(cost) / self.median_s - 1.0


def grid(config: CalibrateConfig) -> tuple[StepPoint, ...]:
    """Return the steps to be measured, those of a kind together."""
    middle, batches, contexts = config.middle_prompt, config.decode_batches, config.contexts
    return (
        *(StepPoint(prompts=1, tokens=tokens) for tokens in config.prompts),
        *(StepPoint(prompts=1, tokens=middle, cached=tokens) for tokens in config.cached),
        *(StepPoint(prompts=number, tokens=middle) for number in config.prompt_batches if number > 1),
        *(StepPoint(decodes=batch, context=context) for batch in batches for context in contexts),
        *_checks(config),
    )


def _checks(config: CalibrateConfig) -> tuple[StepPoint, ...]:
    shorter, longest = config.prompts[-2:]
    batch, context = _between(config.decode_batches), _between(config.contexts)
    checks = [
        StepPoint(prompts=1, tokens=(shorter + longest) // 2, is_check=True),
        StepPoint(prompts=1, tokens=config.middle_prompt, decodes=batch, context=context, is_check=True),
    ]
    checks += [
        StepPoint(prompts=1, tokens=longest, cached=tokens, is_check=True) for tokens in config.cached[:1]
    ]
    if batch not in config.decode_batches or context not in config.contexts:
        checks.append(StepPoint(decodes=batch, context=context, is_check=True))
    return tuple(checks)


def _between(values: tuple[int, ...]) -> int:
    """Return the middle of the two last values, or the only one."""
    return sum(values[-2:]) // len(values[-2:])
