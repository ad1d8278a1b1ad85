"""A file of records: a line of JSON for each request, as it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from twinpool.core.config import bind
from twinpool.lab.record import Record
from twinpool.lab.workload.traces.lines import read_objects

_DIGITS = 6  # behind the point: microseconds


def record_line(record: Record) -> str:
    """Return a record as one line, to the microsecond and without what has its default."""
    told: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            told[field.name] = _rounded(value)
    return json.dumps(told, separators=(",", ":"))


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, as it is read.

    Raises:
        ConfigError: The file cannot be read, or a line is no record; it is named.
    """
    for where, line in read_objects(path):
        yield bind(Record, line, where)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, _DIGITS)
    return [_rounded(item) for item in value] if isinstance(value, tuple) else value
