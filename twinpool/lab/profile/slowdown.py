"""How workers of one machine slow each other down: they share its cores, its caches and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from twinpool.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How many times as long a step takes while so many workers compute, one worker first.

    Attributes:
        prompts: Of a step with a prompt, or a part of one, in it.
        decodes: Of a step that only decodes.
    """

    prompts: tuple[float, ...]
    decodes: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, values in (("prompts", self.prompts), ("decodes", self.decodes)):
            if len(values) < 2 or values[0] != 1.0:
                raise ConfigError(
                    f"slowdown.{name}", "is not 1 of one worker, and then a value for each number of them"
                )
            if any(fewer > more for fewer, more in pairwise(values)):
                raise ConfigError(f"slowdown.{name}", "is less of more workers")

    def of(self, num_busy: int, *, has_prompt: bool) -> float:
        """Return it for ``num_busy`` workers, at least one.

        Beyond what was measured it grows in proportion, as cores that are all busy are shared.
        """
        return _at(self.prompts if has_prompt else self.decodes, num_busy)


def _at(values: Sequence[float], num_busy: int) -> float:
    most = len(values)
    return values[min(num_busy, most) - 1] * max(1.0, num_busy / most)
