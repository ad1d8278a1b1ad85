"""Sizes and times as people write them."""

from __future__ import annotations

import re

from twinpool.core.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}

_LEAST_BARE = 1000  # nobody means so few bytes: a unit was forgotten
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_seconds(text: str, *, field: str) -> float:
    """Read a time as in ``5ms``, ``0.2s`` or ``80us``.

    Raises:
        ConfigError: It is none; ``field`` is blamed.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, flags=re.ASCII)
    if match is None or match[2] not in _SECONDS:
        raise ConfigError(field, f"{text!r} is no time such as 5ms, 0.2s or 80us")
    return float(match[1]) * _SECONDS[match[2]]


def parse_bytes(text: str, *, field: str = "--kv-memory") -> int:
    """Read a size as in ``512MiB``, ``2GB``, ``1.5GiB`` or ``1048576``.

    Args:
        text: A number and a unit; upper and lower case mean the same.
        field: What the error blames.

    Raises:
        ConfigError: It is no size, less than a byte, or a few bytes where a unit was forgotten.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text, flags=re.ASCII)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(field, f"{text!r} is no size such as 512MiB, 2GB or 1.5GiB")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 1:
        raise ConfigError(field, f"{text!r} is less than one byte")
    if not match[2] and size < _LEAST_BARE:
        raise ConfigError(field, f"{text!r} has no unit, as in {text.strip()}GiB")
    return size
