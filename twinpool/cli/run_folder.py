"""The folder of a run: its records as they come, and at the end what they come to.

Until then both have other names, so that a run that does not begin, or is killed, leaves those of an earlier
one whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinpool.core.errors import ConfigError
from twinpool.lab.record import Record
from twinpool.lab.records import record_line

_RECORDS, _SUMMARY = "requests.jsonl", "summary.json"
_NEW = ".new"  # behind the names, until the run has ended


class RunFolder:
    """Takes what is to be written; a disk that is full ends no run, and is told at its end.

    Args:
        folder: It is made, if it is not there.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problem: OSError | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._records = self._new(_RECORDS).open("w", encoding="utf-8")
        except OSError as error:
            raise self._refusal(error) from None

    def add(self, record: Record) -> None:
        """Write a record, unless one before it could not be written."""
        if self._problem is None:
            try:
                print(record_line(record), file=self._records)
            except OSError as error:
                self._problem = error

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write what the run came to, and give both files their names.

        Raises:
            ConfigError: Not all of it could be written; an earlier run in the folder is as it was.
        """
        try:
            self._records.close()
            text = json.dumps(summary, indent=2, allow_nan=False)
            self._new(_SUMMARY).write_text(text + "\n", encoding="utf-8")
            if self._problem is None:
                for name in (_RECORDS, _SUMMARY):
                    self._new(name).replace(self._folder / name)
        except OSError as error:
            self._problem = self._problem or error
        if self._problem is not None:
            raise self._refusal(self._problem)

    def leave(self) -> None:
        """Close what is open after the run, however it ended; records without a summary stay as they are."""
        if not self._records.closed:
            try:
                self._records.close()
                if not self._new(_RECORDS).stat().st_size:
                    self._new(_RECORDS).unlink()
            except OSError as error:
                self._problem = error

    def _new(self, name: str) -> Path:
        return self._folder / f"{name}{_NEW}"

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError("--out", f"{self._folder} cannot be written: {error.strerror}")


class _Nowhere:
    """Takes the same, where nothing is to be written."""

    def add(self, record: Record) -> None:
        pass

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


@contextmanager
def run_folder(out: str | None) -> Iterator[RunFolder | _Nowhere]:
    """Open the folder ``out``, if there is one, for one run.

    Raises:
        ConfigError: It cannot be written.
    """
    if out is None:
        yield _Nowhere()
        return
    folder = RunFolder(Path(out))
    try:
        yield folder
    finally:
        folder.leave()
