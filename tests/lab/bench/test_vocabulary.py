"""Prompts: as long as asked, of known tokens, and equal where a workload's blocks are."""

from __future__ import annotations

import pytest

from twinpool.lab.bench.vocabulary import WORDS, Vocabulary
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.workload import open_workload

IDS = tuple(range(100, 400))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 4000])
def test_a_prompt_has_as_many_tokens_as_was_asked_for(tokens: int) -> None:
    item = WorkItem(index=3, arrival_s=0.0, prompt_tokens=tokens, output_tokens=1)

    ids = Vocabulary(IDS).prompt(item)

    assert len(ids) == tokens
    assert set(ids) <= set(IDS)
    assert len(Vocabulary().prompt(item).split(" ")) == len(Vocabulary(IDS).text(item).split(" ")) == tokens


def test_the_same_request_is_the_same_prompt_and_others_are_others() -> None:
    first, second = (WorkItem(index=i, arrival_s=0.0, prompt_tokens=50, output_tokens=1) for i in (1, 2))

    assert Vocabulary(IDS).prompt(first) == Vocabulary(IDS).prompt(first)
    assert Vocabulary(IDS).prompt(first) != Vocabulary(IDS).prompt(second)
    assert Vocabulary(IDS).prompt(first) != Vocabulary(IDS, seed=1).prompt(first)


@pytest.mark.parametrize("vocabulary", [Vocabulary(IDS), Vocabulary()])
def test_each_turn_of_a_conversation_begins_with_the_prompt_of_the_turn_before(
    vocabulary: Vocabulary,
) -> None:
    before: dict[str, list[object]] = {}
    num_later = 0
    for item in open_workload("sharegpt:conversations=20,turns=4,max_context_tokens=2000"):
        prompt = vocabulary.prompt(item)
        pieces = prompt.split(" ") if isinstance(prompt, str) else prompt
        assert len(pieces) == item.prompt_tokens
        earlier = before.get(item.conversation, [])
        assert pieces[: len(earlier)] == earlier
        num_later += bool(earlier)
        before[item.conversation] = pieces
    assert num_later > 20


def test_blocks_that_differ_in_one_place_give_prompts_that_agree_up_to_there() -> None:
    first, second = (
        WorkItem(index=i, arrival_s=0.0, prompt_tokens=1100, output_tokens=1, blocks=blocks, block_tokens=512)
        for i, blocks in ((0, (0, 7, 9)), (1, (0, 8, 9)))
    )
    one, other = Vocabulary(IDS).prompt(first), Vocabulary(IDS).prompt(second)

    assert one[:512] == other[:512]
    assert one[512:520] != other[512:520]


def test_tokens_behind_the_last_block_are_those_of_the_request_alone() -> None:
    first, second = (
        WorkItem(index=i, arrival_s=0.0, prompt_tokens=40, output_tokens=1, blocks=(5,), block_tokens=16)
        for i in (0, 1)
    )
    one, other = Vocabulary(IDS).prompt(first), Vocabulary(IDS).prompt(second)

    assert one[:16] == other[:16]
    assert one[16:] != other[16:]
    assert len(one) == len(other) == 40


def test_a_real_text_is_sent_as_it_is() -> None:
    item = WorkItem(index=0, arrival_s=0.0, prompt_tokens=2, output_tokens=1, text="Hello there")

    assert Vocabulary(IDS).prompt(item) == Vocabulary(IDS).text(item) == "Hello there"


def test_all_words_are_different_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isascii() and word.isalpha() for word in WORDS)
