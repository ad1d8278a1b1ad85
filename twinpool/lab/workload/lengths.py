"""How many tokens a prompt or an answer has: one distribution a class, drawn from a generator passed in."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.calls import read_call, scalar

_MOST_TOKENS = 10**9


class Lengths(Protocol):
    """Draws numbers of tokens, 1 or more."""

    def draw(self, source: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    def __post_init__(self) -> None:
        _check("fixed.tokens", self.tokens)

    def draw(self, source: random.Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each number from ``least`` to ``most`` as likely as the others."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _check("uniform.least", self.least)
        _check("uniform.most", self.most)
        if self.most < self.least:
            raise ConfigError("uniform.most", f"{self.most} is less than least, {self.least}")

    def draw(self, source: random.Random) -> int:
        return self.least + math.floor(source.random() * (self.most - self.least + 1))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """The logarithm is normal: most are short and a few are very long, as people's prompts are."""

    mean: float  # of the tokens, not of their logarithm
    sigma: float = 1.0  # deviation of the logarithm
    most: int = 1_000_000  # what would be longer has this length

    def __post_init__(self) -> None:
        _check("lognormal.mean", self.mean)
        _check("lognormal.most", self.most)
        if not 0.0 <= self.sigma <= 10.0:
            raise ConfigError("lognormal.sigma", f"{self.sigma} is not in [0, 10]")

    def draw(self, source: random.Random) -> int:
        middle = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.most, round(source.lognormvariate(middle, self.sigma))))


@dataclass(frozen=True, slots=True)
class Bimodal:
    """Short ones and long ones, and nothing between."""

    short: int
    long: int
    long_share: float = 0.5
    spread: float = 0.0  # each is off its mode by up to this share of it

    def __post_init__(self) -> None:
        _check("bimodal.short", self.short)
        _check("bimodal.long", self.long)
        for name in ("long_share", "spread"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"bimodal.{name}", f"{getattr(self, name)} is not in [0, 1]")

    def draw(self, source: random.Random) -> int:
        mode = self.long if source.random() < self.long_share else self.short
        return max(1, round(mode * (1 + self.spread * (2 * source.random() - 1))))


KINDS: Mapping[str, type[Lengths]] = MappingProxyType(
    {"fixed": Fixed, "uniform": Uniform, "lognormal": Lognormal, "bimodal": Bimodal}
)


def read_lengths(text: str, field: str) -> Lengths:
    """Read ``512``, ``uniform(16, 256)``, ``lognormal(512, sigma=0.8)``, ``bimodal(64, 4096, 0.1)``.

    Raises:
        ConfigError: It is none of them; the message begins with ``field``.
    """
    value = scalar(text)
    if isinstance(value, int) and not isinstance(value, bool):
        _check(field, value)
        return Fixed(value)
    return read_call(text, KINDS, field)


def _check(field: str, tokens: float) -> None:
    if tokens < 1:
        raise ConfigError(field, f"{tokens} is less than 1 token")
    if tokens > _MOST_TOKENS:
        raise ConfigError(field, f"{tokens} is more than {_MOST_TOKENS:,} tokens")
