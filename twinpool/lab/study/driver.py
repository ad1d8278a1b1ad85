"""Runs a study: cell after cell, each kept as soon as it is measured; what is there is not measured again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from twinpool.core.errors import RequestCancelled
from twinpool.lab.bench.generator import LoadGenerator
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.study.cell import Cell, Measurement
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.guard import Guard
from twinpool.lab.study.laboratory import Measured
from twinpool.lab.study.order import all_cells, bracket, next_rate, rotated
from twinpool.lab.study.settings import StudySettings

_MOST_TRIES = 2  # at a cell whose measurement does not count


class Measures(Protocol):
    """Measures cells: ``Laboratory``, or a stand-in."""

    @property
    def is_stopped(self) -> bool:
        """Whether somebody asked to stop; what is measured then counts for nothing."""
        ...

    async def prepare(self, cell: Cell) -> Mapping[str, Any]: ...

    async def run(self, cell: Cell) -> Measured: ...


class Watch(Protocol):
    """Is told how a study goes on."""

    def began(self, cell: Cell, *, done: int, total: int | None) -> None:
        """A cell begins; ``total`` is None where a search will show how many there are."""
        ...

    def load(self, generator: LoadGenerator, summary: Summary) -> None:
        """Its load begins; both can be read at any time until it ends."""
        ...

    def ended(self, measurement: Measurement) -> None:
        """A cell was measured; if it has problems it may be measured again."""
        ...


class StudyStopped(RequestCancelled):
    """Somebody asked a study to stop; what was measured is kept."""


class Driver:
    """One sitting of a study.

    Args:
        settings: What is to be measured.
        folder: Held, and begun with these settings.
        measures: Measures a cell.
        watch: Is told of each.
    """

    def __init__(
        self, settings: StudySettings, folder: StudyFolder, measures: Measures, *, watch: Watch
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._measures = measures
        self._watch = watch
        self._done = {
            cell: measurement
            for cell, measurement in folder.measurements().items()
            if not measurement.problems  # one that does not count is worth another try
        }
        self._guard = Guard(settings.allowed)

    async def run(self) -> None:
        """Measure what is not there yet.

        Raises:
            ConfigError: Arms differ in more than their roles.
            StudyStopped: Somebody asked for it.
            Unavailable: The server does not answer.
        """
        for cell, measurement in self._done.items():
            self._guard.check(measurement.config, cell)
        if self._settings.search is None:
            cells = all_cells(self._settings)
            for cell in cells:
                await self._measure(cell, total=len(cells))
        else:
            await self._search()

    async def _search(self) -> None:
        config, names = self._settings.search, [arm.name for arm in self._settings.arms]
        assert config is not None, "a search without its settings"
        found: dict[str, float | None] = dict.fromkeys(names)
        for repeat in range(self._settings.repeats):
            shares: dict[str, dict[float, float]] = {name: {} for name in names}
            searching, turn = set(names), 0
            while searching:
                for name in rotated(names, repeat + turn):
                    rate = next_rate(shares[name], config, near=found[name])
                    if rate is None:
                        searching.discard(name)
                        continue
                    measurement = await self._measure(Cell(arm=name, rate=rate, repeat=repeat), total=None)
                    shares[name][rate] = measurement.good_share
                    if measurement.problems:  # whether it bears that rate is not known, and so no other
                        searching.discard(name)
                turn += 1
            for name in names:
                found[name] = bracket(shares[name], config.share)[0] or found[name]

    async def _measure(self, cell: Cell, *, total: int | None) -> Measurement:
        if cell in self._done:
            return self._done[cell]
        for tries in range(1, _MOST_TRIES + 1):
            self._watch.began(cell, done=len(self._done), total=total)
            measured = await self._measure_once(cell, tries)
            measurement = measured.measurement
            self._folder.add(measurement, records=measured.records, stories=measured.stories)
            self._watch.ended(measurement)
            if not measurement.problems:
                break
        self._done[cell] = measurement
        return measurement

    async def _measure_once(self, cell: Cell, tries: int) -> Measured:
        if self._measures.is_stopped:
            raise StudyStopped("stopped")
        config = await self._measures.prepare(cell)
        self._guard.check(config, cell)
        measured = await self._measures.run(cell)
        if self._measures.is_stopped:
            raise StudyStopped("stopped")
        self._guard.check(measured.measurement.config, cell)
        return replace(measured, measurement=replace(measured.measurement, tries=tries))
