"""Lines of a file, one JSON object each, and errors that say where."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from twinpool.core.errors import ConfigError

MOST_TOKENS = 10**9  # of a request


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not empty, as the file is read.

    Raises:
        ConfigError: The file cannot be read, is no UTF-8, or is a pipe, which could be read only once.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(str(path), "is not a regular file")
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None


def read_objects(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where it stands, as ``FILE:LINE``, and the object of each line.

    Raises:
        ConfigError: A line is no JSON object.
    """
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(where, f"is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(where, "is not a JSON object")
        yield where, value


def whole_number(value: object, field: str, *, least: int, most: int | None = None) -> int:
    """Check a number of tokens or the like.

    Raises:
        ConfigError: It is another value, or is not from ``least`` to ``most``.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(field, f"{value!r} is not a whole number")
    if value < least:
        raise ConfigError(field, f"{value} is less than {least}")
    if most is not None and value > most:
        raise ConfigError(field, f"is more than {most:,}")
    return value
