"""When requests come: one process a class, drawn from a generator passed in.

Times do not depend on lengths, and scale with the rate: with one seed, twice the rate is the same requests at
half the times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.calls import read_call


class Arrivals(Protocol):
    """Gives times in seconds after the start, never decreasing, without end."""

    @property
    def rate(self) -> float:
        """Requests per second, in the mean."""
        ...

    def times(self, source: random.Random) -> Iterator[float]: ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent requests: each moment as likely as any other."""

    rate: float  # requests per second

    def __post_init__(self) -> None:
        _check("poisson.rate", self.rate)

    def times(self, source: random.Random) -> Iterator[float]:
        now_s = 0.0
        while True:
            now_s += source.expovariate(1.0) / self.rate
            yield now_s


@dataclass(frozen=True, slots=True)
class Gamma:
    """Bursts: gaps have a gamma distribution.  A ``cv`` of 1 is ``poisson``, of 0 nearly ``constant``."""

    rate: float  # requests per second
    cv: float = 2.0  # of the gaps: their deviation by their mean

    def __post_init__(self) -> None:
        _check("gamma.rate", self.rate)
        if not 0.001 <= self.cv <= 100.0:
            raise ConfigError("gamma.cv", f"{self.cv} is not in [0.001, 100]")

    def times(self, source: random.Random) -> Iterator[float]:
        now_s, shape = 0.0, 1 / self.cv**2
        while True:
            now_s += source.gammavariate(shape, 1 / shape) / self.rate
            yield now_s


@dataclass(frozen=True, slots=True)
class Constant:
    """One every ``1 / rate`` seconds, the first at once."""

    rate: float  # requests per second

    def __post_init__(self) -> None:
        _check("constant.rate", self.rate)

    def times(self, source: random.Random) -> Iterator[float]:
        number = 0
        while True:
            yield number / self.rate
            number += 1


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All at the start."""

    @property
    def rate(self) -> float:
        return math.inf

    def times(self, source: random.Random) -> Iterator[float]:
        while True:
            yield 0.0


KINDS: Mapping[str, type[Arrivals]] = MappingProxyType(
    {"poisson": Poisson, "gamma": Gamma, "constant": Constant, "at_once": AtOnce}
)


def read_arrivals(text: str, field: str) -> Arrivals:
    """Read ``poisson(4)``, ``gamma(4, cv=2)``, ``constant(4)`` or ``at_once``.

    Raises:
        ConfigError: It is none of them; the message begins with ``field``.
    """
    return read_call(text, KINDS, field)


def _check(field: str, rate: float) -> None:
    if not 1e-9 <= rate <= 1e9:
        raise ConfigError(field, f"{rate} is not in [1e-9, 1e9]")
