"""config.json of a checkpoint, read with care: every complaint names the field.

Knows JSON and types; does not know what any field means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from twinpool.core.errors import ModelError


class ModelConfig:
    """Fields of a config.json; a null counts as absent, as in transformers.

    Args:
        fields: The parsed JSON object.
        source: What messages call it.
    """

    def __init__(self, fields: Mapping[str, object], *, source: str = "config.json") -> None:
        self.fields = fields
        self._source = source

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1, or ``default`` if the field is absent.

        Raises:
            ModelError: The field is no such number, or is absent and has no default.
        """
        value = self.fields.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"{value!r} is no whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0, or ``default`` if the field is absent.

        Raises:
            ModelError: The field is no such number, or is absent and has no default.
        """
        value = self.fields.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
            raise self.error(name, f"{value!r} is no number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean, or ``default`` if the field is absent.

        Raises:
            ModelError: The field is something else.
        """
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"{value!r} is neither true nor false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string, or ``default`` if the field is absent.

        Raises:
            ModelError: The field is something else, or is absent and has no default.
        """
        value = self.fields.get(name, default)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise self.error(name, "is missing" if value is None else f"{value!r} is no string")
        return value

    def choice(self, name: str, known: Sequence[str], default: str | None = None) -> str:
        """Return a string that is one of ``known``.

        Raises:
            ModelError: It is none of them; the message lists them.
        """
        value = self.text(name, default)
        if value not in known:
            raise self.error(name, f"{value!r} is none of {', '.join(known)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty if the field is absent.

        Raises:
            ModelError: The field is something else.
        """
        value = self.fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(name, f"{value!r} is no list of strings")
        return tuple(value)

    def part(self, name: str) -> ModelConfig | None:
        """Return an object inside this one, or None if the field is absent.

        Raises:
            ModelError: The field is something else.
        """
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"{value!r} is no object")
        return ModelConfig(value, source=f"{self._source}: {name}")

    def error(self, name: str, problem: str) -> ModelError:
        """Return a complaint about one field."""
        return ModelError("--model", f"{self._source}: {name}: {problem}")


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        ModelError: It is missing, unreadable or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError("--model", f"{path.name} is missing in {path.parent}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError("--model", f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError("--model", f"{path} holds no JSON object")
    return value
