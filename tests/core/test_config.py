"""Binding YAML to dataclasses: what is not understood is refused, by path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from twinpool.core.config import bind, load_yaml, merge, nested, parse_yaml, to_yaml, unbind
from twinpool.core.errors import ConfigError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    max_batch_tokens: int = 8
    block_tokens: int = 16
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError("engine.block_tokens", f"{self.block_tokens} is less than 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    name: str
    engine: Engine = Engine()
    colour: Colour = Colour.RED


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    workers: tuple[Worker, ...] = ()
    model: str | None = None
    folder: Path = Path("/x")
    eager: bool = False
    labels: Mapping[str, int] = field(default_factory=dict)


def test_what_is_left_out_takes_its_default() -> None:
    assert bind(Root, {}) == Root()


def test_nested_values_are_built() -> None:
    root = bind(
        Root,
        parse_yaml(
            "workers: [{name: a, colour: blue, engine: {ratio: 1}}]\nfolder: /y\nlabels: {k: 3}", source="t"
        ),
    )

    assert root.workers == (Worker(name="a", colour=Colour.BLUE, engine=Engine(ratio=1.0)),)
    assert root.folder == Path("/y")
    assert root.labels == {"k": 3}


def test_an_unknown_key_is_named_with_its_path_and_its_nearest_neighbour() -> None:
    with pytest.raises(ConfigError) as caught:
        bind(Root, {"workers": [{"name": "a", "engine": {"max_batch_token": 1}}]})

    assert str(caught.value) == (
        "workers[0].engine.max_batch_token: is none of block_tokens, max_batch_tokens, ratio; "
        "did you mean max_batch_tokens?"
    )


def test_a_key_like_none_of_the_known_ones_gets_no_advice() -> None:
    with pytest.raises(ConfigError) as caught:
        bind(Engine, {"zzz": 1})

    assert str(caught.value) == "zzz: is none of block_tokens, max_batch_tokens, ratio"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"workers": 3}, "workers: 3 is a whole number, not a list"),
        ({"workers": [3]}, "workers[0]: is a whole number, not a mapping"),
        ({"workers": [{"engine": {}}]}, "workers[0].name: is missing"),
        ({"workers": [{"name": 1}]}, "workers[0].name: 1 is a whole number, not a text"),
        ({"workers": [{"name": "a", "colour": "rad"}]}, "is none of red, blue; did you mean red?"),
        ({"eager": 1}, "eager: 1 is a whole number, not true or false"),
        ({"eager": "yes"}, "eager: 'yes' is a text, not true or false"),
        ({"model": 1}, "model: 1 is a whole number, not a text"),
        ({"labels": {"k": "v"}}, "labels.k: 'v' is a text, not a whole number"),
        ({"folder": None}, "folder: None is a null, not a path"),
        ({"workers": [{"name": "a", "engine": {"ratio": float("nan")}}]}, "ratio: nan is not finite"),
        ({1: 2}, "1: is none of"),
        ([], "config: is a list, not a mapping"),
    ],
)
def test_a_value_of_another_type_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(Root, value)

    assert message in str(caught.value)


def test_true_is_no_number() -> None:
    with pytest.raises(ConfigError, match="max_batch_tokens: True is a true/false value, not a whole number"):
        bind(Engine, {"max_batch_tokens": True})


def test_a_value_that_the_dataclass_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.block_tokens: 0 is less than 1"):
        bind(Root, {"workers": [{"name": "a", "engine": {"block_tokens": 0}}]})


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml: is not valid YAML: the key 'a' stands twice"):
        parse_yaml("a: 1\nb: 2\na: 3\n", source="f.yaml")


def test_yaml_cannot_make_objects() -> None:
    with pytest.raises(ConfigError, match="is not valid YAML"):
        parse_yaml("a: !!python/object/apply:os.getcwd []", source="t")


@pytest.mark.parametrize("text", ["- 1", "3", "word", "a: [", "\t"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^t: is "):
        parse_yaml(text, source="t")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load_yaml(tmp_path / "none.yaml")


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")

    assert load_yaml(tmp_path / "empty.yaml") == {}


def test_what_is_printed_binds_to_an_equal_value() -> None:
    root = Root(workers=(Worker(name="a", colour=Colour.BLUE),), model="m", labels={"k": 1})

    assert bind(Root, parse_yaml(to_yaml(root), source="t")) == root
    assert unbind(root)["workers"][0]["colour"] == "blue"


def test_values_of_any_type_are_kept_as_they_are() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Told:
        values: Mapping[str, Any]

    values = {"text": "a", "list": [1, {"deep": None}]}

    assert bind(Told, {"values": values}) == Told(values=values)


def test_leaves_are_laid_on_top_and_neither_mapping_changes() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    over = nested("a.c", 5)

    assert merge(base, over) == {"a": {"b": 1, "c": 5}, "d": 3}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}
    assert over == {"a": {"c": 5}}
