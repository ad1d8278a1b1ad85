"""A workload as it is asked for: what kind, and which part of it at which pace.

One line, ``KIND:KEY=VALUE,KEY=VALUE``, or the same as a mapping of YAML with the key ``kind``::

    synthetic:prompt=lognormal(512,sigma=0.8),output=uniform(16,256),arrival=poisson(4),count=200
    trace:path=conv.csv,start_s=600,end_s=900,speed=0.5
    sharegpt:arrival=poisson(0.5),turns=4,count=300,seed=7
    prompts:path=questions.txt,arrival=gamma(2,cv=3)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Protocol

from twinpool.core.config import bind, unbind
from twinpool.core.errors import ConfigError
from twinpool.lab.workload.arrivals import read_arrivals
from twinpool.lab.workload.calls import scalar, split
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.prompts import Prompts
from twinpool.lab.workload.shape import Shape
from twinpool.lab.workload.sharegpt import ShareGPT
from twinpool.lab.workload.synthetic import Synthetic
from twinpool.lab.workload.trace import Trace

_MOST_DRAWN = 10**9  # requests, before the time at which a workload ends or begins to count


class Source(Protocol):
    """Where requests come from: a frozen dataclass of settings."""

    @property
    def arrival(self) -> str:
        """When requests come, as ``arrivals.read_arrivals`` reads it; empty: its own."""
        ...

    @property
    def ends(self) -> bool:
        """Whether it ends by itself."""
        ...

    @property
    def is_drawn(self) -> bool:
        """Whether another ``seed`` makes other requests, and not the same ones at other times."""
        ...

    def items(self) -> Iterator[WorkItem]: ...


KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {"synthetic": Synthetic, "trace": Trace, "sharegpt": ShareGPT, "prompts": Prompts}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An iterable of ``WorkItem`` that gives the same ones each time it is gone through, lazily."""

    kind: str
    source: Source
    shape: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        if not self.source.ends:
            self._check_end()

    def __iter__(self) -> Iterator[WorkItem]:
        return self.shape.of(self.source.items())

    def _check_end(self) -> None:
        """Check that what is drawn without end reaches its end while somebody can wait for it."""
        shape, arrival = self.shape, self.source.arrival
        if not shape.ends:
            raise ConfigError("workload.count", f"is missing: {self.kind} does not end without it or end_s")
        name = "end_s" if shape.count is None else "start_s"  # when that is, drawing ends, or a count begins
        last_s = getattr(shape, name)
        if last_s > 0.0 and read_arrivals(arrival, "workload.arrival").rate * last_s > _MOST_DRAWN:
            problem = f"{arrival} brings more than {_MOST_DRAWN:,} requests before {last_s:g} s"
            raise ConfigError(f"workload.{name}", problem)

    def at_speed(self, speed: float) -> Workload:
        """Return the same requests at ``speed`` times the rate of the source."""
        return replace(self, shape=replace(self.shape, speed=speed))

    def to_json(self) -> dict[str, Any]:
        """Return every setting, so that ``open_workload`` of it gives an equal workload."""
        return {"kind": self.kind, **unbind(self.source), **unbind(self.shape)}


def open_workload(spec: str | Mapping[str, Any]) -> Workload:
    """Read a workload from one line or a mapping; the file of a trace is opened when it is gone through.

    Raises:
        ConfigError: The kind or a setting is unknown, or does not fit; the field begins with ``workload``.
    """
    given: dict[str, Any] = (
        _read_line(spec) if isinstance(spec, str) else {key: _text(key, spec[key]) for key in spec}
    )
    kind = given.pop("kind", None)
    if kind not in KINDS:
        raise ConfigError("workload.kind", f"{kind!r} is none of {', '.join(KINDS)}")
    of_shape = {field.name for field in fields(Shape)}
    shape = {key: given.pop(key) for key in list(given) if key in of_shape}
    return Workload(
        kind=kind,
        source=bind(KINDS[kind], given, "workload"),
        shape=bind(Shape, shape, "workload"),
    )


def _read_line(line: str) -> dict[str, Any]:
    kind, _, rest = line.partition(":")
    given: dict[str, Any] = {"kind": kind.strip()}
    for part in split(rest, "workload"):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError("workload", f"{part!r} is not KEY=VALUE")
        if key.strip() in given:
            raise ConfigError(f"workload.{key.strip()}", "stands twice")
        given[key.strip()] = value.strip() if key.strip() in _TEXTS else scalar(value)
    return given


_TEXTS = ("prompt", "output", "message", "arrival", "path", "format")


def _text(key: str, value: object) -> object:
    """A number of tokens is a text too: ``prompt: 512``."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if key in _TEXTS and is_number else value
