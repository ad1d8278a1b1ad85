"""Tokenizer: the ids of transformers, BOS once, every end token, ids that exist."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.text.folders import write_byte_fallback, write_byte_level
from twinpool.core.errors import InvalidRequest, ModelError
from twinpool.text.tokenizer import Tokenizer

TEXTS = (
    "the quick brown fox",
    " leading and trailing ",
    "<s>rendered<|end|>",
    "a <think> b",
    "\U0001f600 caf\u00e9\n\n12345",
    "",
)
WRITERS = (write_byte_level, write_byte_fallback)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(
    write: Callable[..., Path], adds_bos: bool, text: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, adds_bos=adds_bos)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    expected = reference(text)["input_ids"]
    if expected[:2] == [reference.bos_token_id] * 2:
        expected = expected[1:]

    assert tokenizer.encode(text, add_special_tokens=True) == expected
    assert (
        tokenizer.encode(text, add_special_tokens=False)
        == reference(text, add_special_tokens=False)["input_ids"]
    )


@pytest.mark.parametrize("setting", [True, False])
def test_tokenizer_json_alone_says_whether_bos_is_added(setting: bool, tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, adds_bos=not setting, add_bos_token=setting)

    ids = Tokenizer.load(folder).encode("word", add_special_tokens=True)

    assert ids == AutoTokenizer.from_pretrained(folder)("word")["input_ids"]


def test_bos_is_not_added_to_a_text_that_begins_with_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path, adds_bos=True))

    rendered = tokenizer.encode("<s>word", add_special_tokens=True)

    assert rendered == tokenizer.encode("word", add_special_tokens=True)
    assert [token_id for token_id in rendered if token_id == tokenizer.bos_id] == rendered[:1]


def test_a_second_bos_that_the_client_wrote_stays(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path, adds_bos=True))

    ids = tokenizer.encode("<s><s>word", add_special_tokens=True)

    assert ids[:2] == [tokenizer.bos_id] * 2
    assert ids[2:] == tokenizer.encode("word", add_special_tokens=False)


def test_the_begin_is_the_first_that_the_folder_names(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, bos_token=None)
    assert Tokenizer.load(folder).bos_id is None

    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1}))
    assert Tokenizer.load(folder).bos_id == 1

    (folder / "config.json").write_text(json.dumps({"bos_token_id": 7}))
    assert Tokenizer.load(folder).bos_id == 7


def test_every_id_below_the_vocabulary_size_has_a_text_and_none_above(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path))

    markup_id = tokenizer.encode("<think>", add_special_tokens=False)[0]
    assert markup_id == tokenizer.vocab_size - 1
    assert all(tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size))
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([-1, tokenizer.vocab_size], skip_special_tokens=False) == ""


def test_a_token_keeps_its_leading_space_and_its_bytes(tmp_path: Path) -> None:
    for write in WRITERS:
        tokenizer = Tokenizer.load(write(tmp_path / write.__name__))
        ids = tokenizer.encode("a the\U0001f680", add_special_tokens=False)

        assert b"".join(map(tokenizer.token_bytes, ids)).lstrip() == "a the\U0001f680".encode()
        assert tokenizer.token_text(ids[-1]) == "\ufffd"
        assert " the" in {tokenizer.token_text(token_id) for token_id in ids}


def test_a_truncation_that_the_folder_asks_for_cuts_no_prompt(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(state))

    assert len(Tokenizer.load(folder).encode("1 2 3 4", add_special_tokens=False)) > 2


def test_half_an_emoji_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="prompt: has a character that is no Unicode text"):
        Tokenizer.load(write_byte_level(tmp_path)).encode("\ud83d", add_special_tokens=False)


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)

    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path))
    encoding = threading.Thread(
        target=tokenizer.encode, args=("a" * 1_000_000,), kwargs={"add_special_tokens": True}
    )
    num_turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        num_turns += 1

    assert num_turns > 10
