"""IncrementalDetokenizer: the deltas joined are the whole, and no character is shown before its last byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from tests.text.folders import write_byte_fallback, write_byte_level, write_metaspace
from twinpool.core.errors import ModelError
from twinpool.text.detokenizer import IncrementalDetokenizer
from twinpool.text.pieces import TokenPieces
from twinpool.text.tokenizer import Tokenizer

KINDS: dict[str, Callable[[Path], Path]] = {
    "byte_level": write_byte_level,
    "byte_fallback": write_byte_fallback,
    "metaspace": write_metaspace,
}
HARD_TEXTS = (
    "\U0001f600\U0001f680",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    "e\u0301a\u0308 combining",
    "\u4f60\u597d\ud55c\uad6d\u30c6",
    "  two leading spaces",
    "\n\ttabs ",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write(tmp_path_factory.mktemp(kind)) for kind, write in KINDS.items()}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def backends(folders: dict[str, Path]) -> dict[str, Backend]:
    return {kind: Backend.from_file(str(folder / "tokenizer.json")) for kind, folder in folders.items()}


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_text_comes_out_whole(kind: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers[kind].encode(text, add_special_tokens=False)

    parts = deltas(tokenizers[kind], ids, skip_special_tokens=False)

    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_an_emoji_of_four_tokens_appears_with_the_fourth(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "byte_fallback"):
        ids = tokenizers[kind].encode("\U0001f680", add_special_tokens=False)[-4:]

        parts = deltas(tokenizers[kind], ids, skip_special_tokens=True)

        assert parts == ["", "", "", "\U0001f680", ""]


def test_an_answer_cut_inside_a_character_ends_with_one_replacement(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "byte_fallback"):
        ids = tokenizers[kind].encode("\U0001f600\U0001f680", add_special_tokens=False)[:-1]

        parts = deltas(tokenizers[kind], ids, skip_special_tokens=True)

        assert "".join(parts) == "\U0001f600\ufffd"
        assert parts[-1] == "\ufffd"


def test_only_a_space_that_begins_the_answer_is_dropped(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    ids = tokenizer.encode("the end", add_special_tokens=False)

    assert "".join(deltas(tokenizer, ids + ids, skip_special_tokens=True)) == "the end the end"


def test_special_tokens_are_shown_or_left_out(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("<s>word<|end|>", add_special_tokens=False)

    assert "".join(deltas(tokenizer, ids, skip_special_tokens=True)) == "word"
    assert "".join(deltas(tokenizer, ids, skip_special_tokens=False)) == "<s>word<|end|>"


@pytest.mark.parametrize("kind", list(KINDS))
@given(data=st.data())
@settings(max_examples=150)
def test_deltas_of_any_ids_join_to_the_decoded_whole(
    kind: str, data: st.DataObject, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    # Ids beyond the vocabulary come from padded embeddings and have no text.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    skip = data.draw(st.booleans())

    joined = "".join(deltas(tokenizer, ids, skip_special_tokens=skip))

    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@given(data=st.data())
@settings(max_examples=150)
def test_any_ids_decode_as_the_library_decodes_them(
    kind: str, data: st.DataObject, tokenizers: dict[str, Tokenizer], backends: dict[str, Backend]
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizers[kind].vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())

    text = tokenizers[kind].decode(ids, skip_special_tokens=skip)

    assert text == backends[kind].decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
@settings(max_examples=200)
def test_text_in_bytes_decodes_as_the_library_decodes_it(
    tokenizers: dict[str, Tokenizer], backends: dict[str, Backend], text: str
) -> None:
    ids = backends["byte_fallback"].encode(text, add_special_tokens=False).ids

    decoded = tokenizers["byte_fallback"].decode(ids, skip_special_tokens=True)

    assert decoded == backends["byte_fallback"].decode(ids, skip_special_tokens=True)


def test_a_bad_byte_leaves_the_characters_beside_it_alone(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    emoji = tokenizer.encode("\U0001f680", add_special_tokens=False)[-4:]

    text = tokenizer.decode([*emoji, emoji[1], *emoji], skip_special_tokens=True)

    assert text == "\U0001f680\ufffd\U0001f680"


def test_a_decoder_that_looks_at_neighbours_is_refused() -> None:
    with pytest.raises(ModelError, match="tokenizer decoder WordPiece is not supported"):
        TokenPieces({"type": "WordPiece", "prefix": "##", "cleanup": True})
