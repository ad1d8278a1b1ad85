"""The guard lets roles differ, and names everything else that does."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.core.errors import ConfigError
from twinpool.lab.study.guard import LOADS, ROLES, check, differences, flatten

ONE: dict[str, Any] = {
    "settings": {"engine": {"block_tokens": 16, "policy": "decode_first"}, "threads": 1},
    "workers": {"a": {"role": "prefill", "dtype": "float32"}, "b": {"role": "decode", "dtype": "float32"}},
    "load": {"speed": 2.0},
}
NAMES = ("1:1", "colocated")


def changed(*path: str, to: object) -> dict[str, Any]:
    if not path:
        return to  # type: ignore[return-value]
    key, *below = path

    def replaced(value: Any, keys: list[str]) -> Any:
        return to if not keys else {**value, keys[0]: replaced(value.get(keys[0], {}), keys[1:])}

    return {**ONE, key: replaced(ONE.get(key, {}), below)}


def test_every_leaf_has_its_path() -> None:
    assert dict(flatten({"a": [1, {"b": None}], "c": {}, "d": []})) == {
        "a.0": 1,
        "a.1.b": None,
        "c": {},
        "d": [],
    }


def test_roles_may_differ() -> None:
    check(ONE, changed("workers", "a", "role", to="colocated"), names=NAMES, allowed=ROLES)


@pytest.mark.parametrize(
    ("path", "to", "message"),
    [
        (
            ("settings", "engine", "block_tokens"),
            32,
            r"^settings\.engine\.block_tokens: is 16 in 1:1 and 32 in col",
        ),
        (("settings", "threads"), 2, r"^settings\.threads: is 1 in 1:1 and 2 in"),
        (("settings", "threads"), True, r"^settings\.threads: is 1 in 1:1 and True in"),
        (("workers", "b", "dtype"), "bfloat16", r"^workers\.b\.dtype: is 'float32' in 1:1 and 'bfloat16' in"),
        (("workers", "c", "role"), "decode", None),
        (("workers", "c", "dtype"), "float32", r"^workers\.c\.dtype: is '\(absent\)' in 1:1"),
        (("load", "speed"), 3.0, r"^load\.speed: is 2\.0 in 1:1 and 3\.0"),
    ],
)
def test_anything_else_that_differs_is_named(path: tuple[str, ...], to: object, message: str | None) -> None:
    if message is None:
        check(ONE, changed(*path, to=to), names=NAMES, allowed=ROLES)
        return
    with pytest.raises(ConfigError, match=message):
        check(ONE, changed(*path, to=to), names=NAMES, allowed=ROLES)


def test_what_is_listed_may_differ_too() -> None:
    other = changed("settings", "threads", to=2)

    check(ONE, other, names=NAMES, allowed=(*ROLES, "settings.threads"))
    check(ONE, changed("load", "speed", to=9.0), names=NAMES, allowed=(*ROLES, *LOADS))


def test_all_differences_are_counted() -> None:
    other = changed("settings", "engine", to={"block_tokens": 32, "policy": "prefill_first"})

    assert [each.path for each in differences(ONE, other)] == [
        "settings.engine.block_tokens",
        "settings.engine.policy",
    ]
    with pytest.raises(ConfigError, match=r"and 1 more: settings\.engine\.policy$"):
        check(ONE, other, names=NAMES, allowed=ROLES)
