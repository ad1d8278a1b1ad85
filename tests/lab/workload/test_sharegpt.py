"""ShareGPT: turns that begin with all that was said, conversations that share a beginning."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.workload import open_workload


def _conversations(spec: str) -> dict[str, list[WorkItem]]:
    turns = defaultdict(list)
    for item in open_workload(spec):
        turns[item.conversation].append(item)
    return turns


def test_a_turns_prompt_begins_with_all_blocks_of_the_turn_before() -> None:
    for turns in _conversations("sharegpt:conversations=50,turns=5,block_tokens=16").values():
        for earlier, later in pairwise(turns):
            assert later.blocks[: len(earlier.blocks)] == earlier.blocks
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens
            assert later.arrival_s > earlier.arrival_s


def test_blocks_are_as_many_as_the_prompt_fills() -> None:
    for item in open_workload("sharegpt:count=200,block_tokens=16"):
        assert 0 <= len(item.blocks) * 16 - item.prompt_tokens < 16


def test_conversations_with_one_system_prompt_share_its_whole_blocks_and_no_more() -> None:
    turns = _conversations("sharegpt:conversations=80,systems=2,system_tokens=40,block_tokens=16")
    beginnings = {first.blocks[:2] for first, *_ in turns.values()}
    behind = [first.blocks[2] for first, *_ in turns.values()]

    assert len(beginnings) == 2  # 40 tokens are two whole blocks
    assert len(set(behind)) == 80


def test_turns_are_as_many_as_was_asked_for_on_average() -> None:
    turns = _conversations(
        "sharegpt:conversations=2000,turns=3,message=20,output=20,max_context_tokens=100000"
    )

    assert sum(map(len, turns.values())) / 2000 == pytest.approx(3.0, rel=0.05)


def test_no_turn_is_longer_than_the_context() -> None:
    items = list(open_workload("sharegpt:conversations=300,turns=20,max_context_tokens=1000"))

    assert max(item.prompt_tokens + item.output_tokens for item in items) <= 1000
    assert min(item.output_tokens for item in items) >= 1
    assert len({item.conversation for item in items}) == 300


def test_turns_of_different_conversations_come_in_the_order_of_time() -> None:
    items = list(open_workload("sharegpt:conversations=100,turns=4"))
    times = [item.arrival_s for item in items]

    assert times == sorted(times)
    assert [item.conversation for item in items] != sorted(item.conversation for item in items)
