"""Checks of what came in a message: what does not fit becomes an ``InvalidRequest`` that names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.core.errors import InvalidRequest

MAX_INT = 2**31 - 1  # the largest token id, and the largest number of anything
MAX_TEXT_CHARS = 512  # of a name, an address or an id


def integer(name: str, value: int, *, least: int = 0, most: int = MAX_INT) -> int:
    """Return a number that is in ``[least, most]``."""
    if not least <= value <= most:
        raise InvalidRequest(name, f"{value} is not in [{least}, {most}]")
    return value


def number(name: str, value: float, *, least: float = -math.inf, most: float = math.inf) -> float:
    """Return a finite number in ``[least, most]``."""
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidRequest(name, f"{value} is not a finite number in [{least}, {most}]")
    return value


def positive(name: str, value: float, *, most: float = math.inf) -> float:
    """Return a finite number above 0."""
    if number(name, value, most=most) <= 0.0:
        raise InvalidRequest(name, f"{value} is not more than 0")
    return value


def text(name: str, value: str, *, least: int = 1) -> str:
    """Return a text of at least ``least`` characters, and not too many."""
    if not least <= len(value) <= MAX_TEXT_CHARS:
        raise InvalidRequest(name, f"{len(value)} characters are not in [{least}, {MAX_TEXT_CHARS}]")
    return value


def hex_digits(name: str, value: str, *, num_digits: int) -> str:
    """Return a text of so many lower-case hex digits."""
    if len(value) != num_digits or not set(value) <= set("0123456789abcdef"):
        raise InvalidRequest(name, f"it is not {num_digits} hex digits")
    return value


def signature(name: str, value: bytes) -> bytes:
    """Return an HMAC of ``core/secret.py``, or nothing."""
    if len(value) not in (0, 32):
        raise InvalidRequest(name, f"{len(value)} bytes are not 32")
    return value


def length(name: str, items: Sequence[Any] | Mapping[str, Any], *, most: int) -> None:
    """Check that there are not more than ``most`` items."""
    if len(items) > most:
        raise InvalidRequest(name, f"{len(items)} entries are more than {most}")
