"""What a server that nobody knows sends: read so that nothing in it can do more than be wrong."""

from __future__ import annotations

import json
from typing import Any

_MOST_TOKENS = 10**9  # that anybody can have counted
_MOST_SHOWN = 500  # characters


def read_json(data: bytes | bytearray) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: It is no JSON, or is nested deeper than anything that means something.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_count(value: object) -> int | None:
    """Return a number of tokens; None if it is no such number, as if it had not been sent."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS:
        return value
    return None


def printable(text: str) -> str:
    """Return the beginning of a text with nothing in it that moves a cursor or that no file can hold."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:_MOST_SHOWN])
