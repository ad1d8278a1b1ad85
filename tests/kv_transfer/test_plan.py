"""plan_head_copies: every head reaches every rank that keeps it, once, whatever the two rank counts."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kv_transfer.plan import HeadCopy, agreed_wire, check_layouts, plan_head_copies
from tests.toys import layout
from twinpool.core.errors import ConfigError, LayoutMismatch
from twinpool.core.layout import KVLayout

TP_SIZES = (1, 2, 3, 4, 6, 8)
KV_HEADS = (1, 2, 3, 4, 6, 8)


def fits(heads: int, tp_size: int) -> bool:
    return heads % tp_size == 0 or tp_size % heads == 0


SHAPES = [
    (heads, source, target)
    for heads, source, target in itertools.product(KV_HEADS, TP_SIZES, TP_SIZES)
    if fits(heads, source) and fits(heads, target)
]


@pytest.mark.parametrize(("heads", "source_tp", "target_tp"), SHAPES)
def test_each_rank_gets_each_of_its_heads_once_from_a_rank_that_keeps_it(
    heads: int, source_tp: int, target_tp: int
) -> None:
    source = layout(num_kv_heads=heads, tp_size=source_tp)
    target = layout(num_kv_heads=heads, tp_size=target_tp)

    arrived: Counter[tuple[int, int]] = Counter()
    for copy in plan_head_copies(source, target):
        for head in range(copy.first_head, copy.first_head + copy.num_heads):
            assert head in source.rank_heads(copy.source_rank)
            arrived[copy.target_rank, head] += 1

    wanted = [(rank, head) for rank in range(target_tp) for head in target.rank_heads(rank)]
    assert arrived == Counter(wanted)


def test_three_plans_by_hand() -> None:
    def plan(heads: int, source_tp: int, target_tp: int) -> list[tuple[int, int, int, int]]:
        copies = plan_head_copies(
            layout(num_kv_heads=heads, tp_size=source_tp), layout(num_kv_heads=heads, tp_size=target_tp)
        )
        return [(c.source_rank, c.target_rank, c.first_head, c.num_heads) for c in copies]

    assert plan(8, 4, 2) == [(0, 0, 0, 2), (1, 0, 2, 2), (2, 1, 4, 2), (3, 1, 6, 2)]
    assert plan(4, 1, 2) == [(0, 0, 0, 2), (0, 1, 2, 2)]
    # Two heads on four ranks each: ranks 0 and 1 keep head 0, ranks 2 and 3 keep head 1.
    assert plan(2, 4, 4) == [(0, 0, 0, 1), (1, 1, 0, 1), (2, 2, 1, 1), (3, 3, 1, 1)]


def test_ranks_that_keep_the_same_head_take_turns_to_send_it() -> None:
    copies = plan_head_copies(layout(num_kv_heads=1, tp_size=2), layout(num_kv_heads=1, tp_size=4))

    assert Counter(copy.source_rank for copy in copies) == {0: 2, 1: 2}


def test_neighbouring_heads_of_one_rank_go_together() -> None:
    shape = layout(num_kv_heads=8, tp_size=2)

    assert plan_head_copies(shape, shape) == (
        HeadCopy(source_rank=0, target_rank=0, first_head=0, num_heads=4),
        HeadCopy(source_rank=1, target_rank=1, first_head=4, num_heads=4),
    )


@pytest.mark.parametrize(("heads", "tp_size"), [(3, 2), (4, 3), (8, 6), (2, 3)])
def test_heads_and_ranks_that_do_not_divide_are_refused(heads: int, tp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel: {tp_size} ranks and {heads} KV heads"):
        layout(num_kv_heads=heads, tp_size=tp_size)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (layout(), layout(head_dim=8), "head_dim: prefill stores 4, decode stores 8"),
        (layout(), layout(num_layers=3), "num_layers: prefill stores 2, decode stores 3"),
        (layout(), layout(num_kv_heads=4), "num_kv_heads: prefill stores 2, decode stores 4"),
        (layout(), layout(dtype="bfloat16"), "dtype: prefill stores float32, decode stores bfloat16"),
    ],
)
def test_layouts_that_cannot_be_matched_are_refused_by_name(
    source: KVLayout, target: KVLayout, message: str
) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        check_layouts(source, target, convert_dtypes=False)


def test_blocks_and_ranks_may_differ_and_dtypes_where_they_are_converted() -> None:
    check_layouts(layout(), layout(block_tokens=3, tp_size=2), convert_dtypes=False)
    check_layouts(layout(), layout(dtype="float16"), convert_dtypes=True)


@pytest.mark.parametrize(
    ("source", "target", "compact", "wire"),
    [
        ("float32", "float32", False, "float32"),
        ("float32", "bfloat16", False, "bfloat16"),
        ("float16", "float32", False, "float16"),
        ("bfloat16", "float16", False, "bfloat16"),
        ("float32", "float32", True, "int8"),
    ],
)
def test_the_narrower_dtype_travels(source: str, target: str, compact: bool, wire: str) -> None:
    assert agreed_wire(layout(dtype=source), layout(dtype=target), compact=compact) == wire
