"""RankPlan: what the other ranks are told of a step, number by number, and nothing of what is private."""

from __future__ import annotations

import pytest

from tests.engine.runs import Sequenced
from tests.toys import request
from twinpool.engine.plan import BatchItem
from twinpool.engine.rank_plan import RankPlan, decode, rank_plan


def told(*items: BatchItem, block_tokens: int = 4) -> RankPlan:
    """What another rank reads of a plan."""
    return decode(rank_plan(items, block_tokens=block_tokens).encode())


def prompt(**fields: object) -> Sequenced:
    made = request((11, 12, 13, 14, 15, 16, 17), request_id="secret", **fields)  # type: ignore[arg-type]
    return Sequenced(made, blocks=(70_000, 5, 9))


def test_another_rank_reads_tokens_positions_and_the_blocks_up_to_the_last_token() -> None:
    sequence = prompt()
    sequence.num_computed_tokens = 2

    (item,) = told(sequence.item(chunk=4)).items

    assert (item.first_token, item.end_token, item.num_tokens) == (2, 6, 4)
    assert item.token_ids.tolist() == [13, 14, 15, 16]
    assert item.blocks.tolist() == [70_000, 5]
    assert not item.samples
    assert item.num_prompt_logits == 0


def test_items_keep_their_order_and_say_which_of_them_sample() -> None:
    first, second = prompt(), prompt()

    items = told(first.item(chunk=100), second.item(chunk=3), first.item(chunk=100)).items

    assert [item.samples for item in items] == [True, False, True]


@pytest.mark.parametrize(
    ("computed", "chunk", "answered", "expected"),
    [(0, 100, 0, 6), (0, 4, 0, 4), (4, 100, 0, 2), (0, 100, 3, 6), (7, 1, 1, 0)],
)
def test_prompt_tokens_that_another_follows_need_logits(
    computed: int, chunk: int, answered: int, expected: int
) -> None:
    sequence = prompt(num_prompt_logprobs=0, max_tokens=9)
    sequence.token_ids += [1] * answered
    sequence.num_computed_tokens = computed

    (item,) = told(sequence.item(chunk=chunk)).items

    assert item.num_prompt_logits == expected


def test_a_request_is_named_only_if_its_kv_leaves() -> None:
    stays, leaves = prompt(), prompt()
    leaves.has_destination = True

    assert [item.request_id for item in told(stays.item(chunk=9), leaves.item(chunk=9)).items] == [
        "",
        "secret",
    ]


def test_a_block_that_is_missing_is_our_own_bug() -> None:
    sequence = prompt()

    with pytest.raises(AssertionError, match="7 tokens need 4 blocks, 3 are owned"):
        rank_plan([sequence.item(chunk=100)], block_tokens=2)
