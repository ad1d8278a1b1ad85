"""The form of a setting in one line: ``NAME(VALUE, KEY=VALUE)``, read into a dataclass.

Knows the form and the types of fields, and nothing of what they mean.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from twinpool.core.config import bind
from twinpool.core.errors import ConfigError

T = TypeVar("T")

_CALL = re.compile(r"\s*([a-z_]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_call(text: str, kinds: Mapping[str, type[T]], field: str) -> T:
    """Build the dataclass that ``text`` names, as in ``lognormal(512, sigma=0.8)``.

    Values without a key are those of the fields in the order in which they are declared.

    Raises:
        ConfigError: The name is none of ``kinds``, or a value does not fit; it begins with ``field``.
    """
    match = _CALL.fullmatch(text)
    if match is None or match[1] not in kinds:
        raise ConfigError(field, f"{text!r} is none of {', '.join(f'{name}(...)' for name in kinds)}")
    kind = kinds[match[1]]
    names = [entry.name for entry in dataclasses.fields(kind)]  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for number, part in enumerate(split(match[2] or "", field)):
        key, equals, value = part.partition("=")
        if not equals:
            if number >= len(names):
                raise ConfigError(field, f"{text!r} has more values than {', '.join(names)}")
            key, value = names[number], part
        if key.strip() in given:
            raise ConfigError(field, f"{key.strip()} stands twice in {text!r}")
        given[key.strip()] = scalar(value)
    return bind(kind, given, f"{field}.{match[1]}")


def split(text: str, field: str) -> list[str]:
    """Cut at the commas that stand in no brackets; nothing gives nothing.

    Raises:
        ConfigError: Brackets are not closed, or nothing stands between two commas.
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise ConfigError(field, f"the brackets of {text!r} do not match")
    if not text.strip():
        return []
    if not all(part.strip() for part in parts):
        raise ConfigError(field, f"nothing stands beside a comma of {text!r}")
    return [part.strip() for part in parts]


def scalar(text: str) -> int | float | bool | str:
    """Read a number or true or false; all else is text as it stands."""
    text = text.strip()
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return {"true": True, "false": False}.get(text, text)
