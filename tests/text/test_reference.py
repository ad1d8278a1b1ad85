"""The embedded model's prompts: the very ids that the reference was made with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.shared import smollm2_references
from twinpool.checkpoints.resolve import resolve_model
from twinpool.text.chat import ChatTemplate
from twinpool.text.detokenizer import IncrementalDetokenizer
from twinpool.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.load(folder, tokenizer)


@pytest.fixture(scope="module")
def transformers_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_prompts_and_answers_are_those_of_the_reference(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    items = smollm2_references()
    assert len(items) == 6
    for item in items:
        if item["chat"]:
            chat = [{"role": "user", "content": item["prompt"]}]
            ids = tokenizer.encode_chat(template.render(chat, add_generation_prompt=True))
        else:
            ids = tokenizer.encode(item["prompt"], add_special_tokens=True)
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        text = "".join(map(detokenizer.push, item["greedy_ids"])) + detokenizer.flush()

        assert ids == item["prompt_ids"]
        assert text == item["text"]


def test_the_begin_and_the_size_are_those_of_the_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_id == 1
    assert tokenizer.special_ids == frozenset(range(17))


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_has_the_ids_of_transformers_and_comes_back_alike(
    text: str, tokenizer: Tokenizer, transformers_tokenizer: Any
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)

    assert ids == transformers_tokenizer(text)["input_ids"]
    # The vocabulary lacks a few bytes, so not every text comes back as it was.
    assert tokenizer.decode(ids, skip_special_tokens=False) == transformers_tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_answer_has_the_text_of_transformers(
    ids: list[int], skip: bool, tokenizer: Tokenizer, transformers_tokenizer: Any
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)

    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    assert text == transformers_tokenizer.decode(ids, skip_special_tokens=skip)


def test_reading_text_needs_no_heavy_library(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from twinpool.text import chat, detokenizer, stop, tokenizer\n"
        f"loaded = tokenizer.Tokenizer.load(Path({str(folder)!r}))\n"
        "chat.ChatTemplate.load(Path(sys.argv[1]), loaded)\n"
        "heavy = ('torch', 'transformers', 'numpy', 'huggingface_hub', 'gguf', 'safetensors')\n"
        "print([name for name in heavy if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "[]"
