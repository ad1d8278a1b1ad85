"""The folder of a study: what was measured is there as soon as it is known, and whole.

settings.json           what is compared and how
cells/NAME.json         one measurement; it is there only once the two files below are whole
records/NAME.jsonl      every request of it, as its client saw it
stories/NAME.jsonl      the same requests, as the server saw them
study.json, report.html, figures/   made from these, at any time
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinpool.core.config import bind, unbind
from twinpool.core.errors import ConfigError
from twinpool.lab.record import Record
from twinpool.lab.records import read_records, record_line
from twinpool.lab.study.cell import FORMAT, Cell, Measurement
from twinpool.lab.study.guard import differences
from twinpool.lab.study.settings import StudySettings
from twinpool.lab.study.stories import check
from twinpool.lab.workload.traces.lines import read_objects

_MAY_GROW = ("rates", "ratios", "repeats", "colocated", "reference")  # what changes no cell that is there
# What reading a value raises that is missing from a file, or is of another kind there.
_UNREADABLE = (LookupError, AttributeError, TypeError, ValueError, ArithmeticError)


class StudyFolder:
    """Where one study lies.

    Args:
        path: Of the folder; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from measuring into the same folder; the end of the process lets go too.

        Raises:
            ConfigError: Somebody does, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError("study.out", f"{self.path} cannot be written: {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError("study.out", f"another study is being measured into {self.path}") from None
            yield

    def begin(self, settings: StudySettings) -> None:
        """Write the settings down; if some are there they must be the same, but may have more cells.

        Raises:
            ConfigError: They are others; the first setting that differs is named.
        """
        if (self.path / "settings.json").exists():
            found = differences(unbind(self.settings()), unbind(settings))
            others = [each for each in found if each.path.split(".")[0] not in _MAY_GROW]
            if others:
                first = others[0]
                text = (
                    f"is {first.one!r} in {self.path} and {first.other!r} now; another study, another folder"
                )
                raise ConfigError(f"study.{first.path}", text)
        for name in ("cells", "records", "stories"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._write("settings.json", _json({"format": FORMAT, "settings": unbind(settings)}))

    def settings(self) -> StudySettings:
        """Read the settings.

        Raises:
            ConfigError: There are none, or this version cannot read them.
        """
        told = self._read("settings.json")
        if told.get("format") != FORMAT:
            raise ConfigError(f"{self.path}/settings.json.format", f"is {told.get('format')!r}, not {FORMAT}")
        return bind(StudySettings, told.get("settings"), "study")

    def add(
        self, measurement: Measurement, *, records: Iterable[Record], stories: Iterable[Mapping[str, Any]]
    ) -> None:
        """Keep a measurement; whatever happens meanwhile, it is there whole or not at all."""
        name = measurement.cell.name
        self._write(f"records/{name}.jsonl", "".join(f"{record_line(record)}\n" for record in records))
        self._write(f"stories/{name}.jsonl", "".join(f"{_line(story)}\n" for story in stories))
        self._write(f"cells/{name}.json", _json(unbind(measurement)))

    def measurements(self) -> dict[Cell, Measurement]:
        """Read every measurement that is there.

        Raises:
            ConfigError: One cannot be read.
        """
        found = {}
        for path in sorted((self.path / "cells").glob("*.json")):
            told = self._read(f"cells/{path.name}")
            if told.get("format") != FORMAT:
                raise ConfigError(f"{path}.format", f"is {told.get('format')!r}, not {FORMAT}")
            measurement = bind(Measurement, told, str(path))
            try:
                measurement.check()
            except _UNREADABLE as error:
                raise ConfigError(f"{path}.bench", f"cannot be read: {error!r}") from None
            found[measurement.cell] = measurement
        return found

    def records(self, cell: Cell) -> Iterator[Record]:
        """Read the requests of a cell; raises as ``measurements``."""
        return read_records(self.path / "records" / f"{cell.name}.jsonl")

    def stories(self, cell: Cell) -> list[Mapping[str, Any]]:
        """Read what the server knew of them; raises as ``measurements``."""
        stories = []
        for where, story in read_objects(self.path / "stories" / f"{cell.name}.jsonl"):
            try:
                check(story)
            except _UNREADABLE as error:
                raise ConfigError(where, f"is no story: {error!r}") from None
            stories.append(story)
        return stories

    def write(self, name: str, data: str | bytes) -> Path:
        """Write what was made of the measurements, whole or not at all."""
        return self._write(name, data)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            told = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(str(path), f"cannot be read: {error}") from error
        if not isinstance(told, dict):
            raise ConfigError(str(path), "holds no object")
        return told

    def _write(self, name: str, data: str | bytes) -> Path:
        path = self.path / name
        fresh = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            raise ConfigError(str(path), f"cannot be written: {error.strerror}") from error
        return path


def _json(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=False, allow_nan=False) + "\n"


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
