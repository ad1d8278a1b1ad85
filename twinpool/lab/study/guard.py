"""The guard: whatever two cells differ in, beside what a study is about, makes the comparison void.

Knows nothing of what the settings mean: it compares every leaf of two mappings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from twinpool.core.errors import ConfigError
from twinpool.lab.study.cell import Cell

ROLES = ("workers.*.role",)  # what arms differ in
LOADS = ("load.*",)  # what cells of other rates or repeats differ in too
_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting that is not the same in two cells."""

    path: str
    one: Any
    other: Any


def flatten(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested mappings and lists with its dotted path; an empty one is a leaf."""
    items: list[tuple[str, object]] = []
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    if not items:
        yield path, value
    for key, item in items:
        yield from flatten(item, f"{path}.{key}" if path else key)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return every setting in which two resolved configs differ, by path."""
    left, right = dict(flatten(one)), dict(flatten(other))
    return tuple(
        Difference(path=path, one=left.get(path, _ABSENT), other=right.get(path, _ABSENT))
        for path in sorted(left.keys() | right.keys())
        if path not in left or path not in right or not _is_same(left[path], right[path])
    )


def check(
    one: Mapping[str, Any], other: Mapping[str, Any], *, names: tuple[str, str], allowed: Sequence[str]
) -> None:
    """Compare two resolved configs.

    Args:
        one: Of a cell.
        other: Of another.
        names: How to call the two in an error.
        allowed: Patterns of paths that may differ, with ``*`` for anything.

    Raises:
        ConfigError: They differ in anything else; the first such setting is its field, and all are named.
    """
    found = [
        difference
        for difference in differences(one, other)
        if not any(fnmatchcase(difference.path, pattern) for pattern in allowed)
    ]
    if found:
        first, more = found[0], len(found) - 1
        also = f", and {more} more: {', '.join(each.path for each in found[1:6])}" if more else ""
        raise ConfigError(
            first.path,
            f"is {first.one!r} in {names[0]} and {first.other!r} in {names[1]}: arms may differ in roles, "
            f"not in this{also}",
        )


def _is_same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


class Guard:
    """Remembers what the first cell, and the first of each load, was set to.

    Args:
        allowed: Patterns of settings that may differ beside the roles.
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = allowed
        self._first: tuple[Cell, Mapping[str, Any]] | None = None
        self._of_load: dict[tuple[float, int], tuple[Cell, Mapping[str, Any]]] = {}

    def check(self, config: Mapping[str, Any], cell: Cell) -> None:
        """Compare the settings of a cell with those of the others; before its load is known without that.

        Raises:
            ConfigError: They differ in what is not listed.
        """
        first = self._first = self._first or (cell, config)
        self._compare(first, config, cell, (*ROLES, *LOADS, *self._allowed))
        if "load" in config:
            same = self._of_load.setdefault((cell.rate, cell.repeat), (cell, config))
            self._compare(same, config, cell, (*ROLES, *self._allowed))

    def _compare(
        self,
        other: tuple[Cell, Mapping[str, Any]],
        config: Mapping[str, Any],
        cell: Cell,
        allowed: tuple[str, ...],
    ) -> None:
        check(other[1], config, names=(_name(other[0]), _name(cell)), allowed=allowed)


def _name(cell: Cell) -> str:
    return f"{cell.arm} at {cell.rate:g} req/s, repeat {cell.repeat + 1}"
