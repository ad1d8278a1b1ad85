"""From YAML to frozen dataclasses and back, strictly: what is not understood is refused with its path.

Knows field types and nothing of what the settings mean; a dataclass checks its own values when it is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from twinpool.core.errors import ConfigError

T = TypeVar("T")


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping; an empty file is an empty mapping.

    Raises:
        ConfigError: The file cannot be read, is no YAML, or names a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    return parse_yaml(text, source=str(path))


def parse_yaml(text: str, *, source: str) -> dict[str, Any]:
    """Parse YAML whose top level is a mapping; ``source`` names it in errors.

    Raises:
        ConfigError: The text is no YAML, no mapping, or names a key twice.
    """
    try:
        loader = _UniqueKeyLoader(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(source, f"is not valid YAML: {_one_line(error)}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(source, f"is a {_yaml_name(value)}, not a mapping")
    return value


def bind(kind: type[T], value: object, path: str = "") -> T:
    """Build the dataclass ``kind`` from a mapping; a key that is left out takes its default.

    Args:
        kind: A dataclass of dataclasses, scalars, enums, paths, tuples, mappings and unions of these.
        value: What YAML gave.
        path: Where ``value`` stands, as in ``workers[0].engine``; empty at the top.

    Raises:
        ConfigError: A key is unknown or missing, or a value has another type.  The field is its path.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(path or "config", f"is a {_yaml_name(value)}, not a mapping")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = _hints(typing.cast("Hashable", kind))
    for key in value:
        if key not in fields:
            raise ConfigError(_join(path, str(key)), _unknown(str(key), sorted(fields)))
    for name, field in fields.items():
        optional = (
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        )
        if name not in value and not optional:
            raise ConfigError(_join(path, name), "is missing")
    return kind(**{key: _bind_value(hints[key], item, _join(path, key)) for key, item in value.items()})


def unbind(value: object) -> Any:
    """Return ``value`` as YAML can hold it: ``bind`` of the result gives an equal value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: unbind(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): unbind(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [unbind(item) for item in value]
    if isinstance(value, StrEnum | Path):
        return str(value)
    return value


def to_yaml(value: object) -> str:
    """Return a dataclass as YAML, fields in the order in which they are declared."""
    return yaml.safe_dump(unbind(value), sort_keys=False, allow_unicode=True)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the leaves of ``over`` laid on top; neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def nested(path: str, value: object) -> dict[str, Any]:
    """Return the mapping that holds ``value`` at a dotted ``path``: ``a.b`` gives ``{"a": {"b": value}}``."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return typing.cast("dict[str, Any]", value)


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, but a key that stands twice in a mapping is an error instead of a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """Resolve a class's annotations once: a file of many records binds one class over and over."""
    return types.MappingProxyType(typing.get_type_hints(kind))


def _bind_value(hint: Any, value: object, path: str) -> Any:
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _bind_union(args, value, path)
    if origin is tuple:
        return _bind_tuple(args, value, path)
    if origin in (Mapping, dict):
        if not isinstance(value, Mapping):
            raise _wrong_type("a mapping", value, path)
        return {
            _bind_value(args[0], key, path): _bind_value(args[1], item, _join(path, str(key)))
            for key, item in value.items()
        }
    if origin is typing.Literal:
        return _choice(value, args, path)
    if dataclasses.is_dataclass(hint):
        return bind(typing.cast("type[Any]", hint), value, path)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(_choice(value, [member.value for member in hint], path))
    return _bind_scalar(hint, value, path)


def _bind_scalar(hint: Any, value: object, path: str) -> Any:
    is_bool = isinstance(value, bool)
    if hint is bool and is_bool:
        return value
    if hint is int and isinstance(value, int) and not is_bool:
        return value
    if hint is float and isinstance(value, int | float) and not is_bool:
        try:
            number = float(value)
        except OverflowError:  # a whole number that no float can hold
            number = math.inf
        if not math.isfinite(number):
            raise ConfigError(path, f"{number} is not finite")
        return number
    if hint is str and isinstance(value, str):
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    assert hint in _SCALARS, f"{path}: no binding for {hint}"
    raise _wrong_type(_SCALARS[hint], value, path)


_SCALARS: Mapping[Any, str] = types.MappingProxyType(
    {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
)


def _bind_union(args: Sequence[Any], value: object, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    others = [arg for arg in args if arg is not type(None)]
    for arg in others[:-1]:
        try:
            return _bind_value(arg, value, path)
        except ConfigError:
            continue
    return _bind_value(others[-1], value, path)


def _bind_tuple(args: Sequence[Any], value: object, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong_type("a list", value, path)
    assert len(args) == 2 and args[1] is Ellipsis, f"{path}: only tuples of one type are bound"
    return tuple(_bind_value(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))


def _choice(value: object, known: Sequence[Any], path: str) -> Any:
    if value not in known:
        raise ConfigError(path, _unknown(str(value), [str(item) for item in known]))
    return value


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"is none of {', '.join(known)}{hint}"


def _wrong_type(wanted: str, value: object, path: str) -> ConfigError:
    return ConfigError(path, f"{value!r} is a {_yaml_name(value)}, not {wanted}")


def _yaml_name(value: object) -> str:
    names: Mapping[type, str] = {
        bool: "true/false value",
        int: "whole number",
        float: "number",
        str: "text",
        list: "list",
        dict: "mapping",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
