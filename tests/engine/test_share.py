"""share_of: every part of a model is kept by the ranks that need it, and by no other."""

from __future__ import annotations

import pytest

from twinpool.core.errors import ConfigError
from twinpool.engine.decoder_config import DecoderConfig
from twinpool.engine.rope import RopeConfig
from twinpool.engine.share import Share, cut, share_of


def shares(*, heads: int, kv_heads: int, size: int, inner: int = 128, vocab: int = 262) -> list[Share]:
    config = DecoderConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        model_dim=64,
        inner_dim=inner,
        vocab_size=vocab,
        norm_epsilon=1e-6,
        rope=RopeConfig(kind="default", inverse_frequencies=(1.0,) * 8, amplitude=1.0, max_tokens=64),
        windows=(None,),
    )
    return [share_of(config, rank=rank, size=size) for rank in range(size)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(4, 1, 2), (4, 1, 4), (4, 2, 4), (4, 4, 2), (9, 3, 3), (9, 3, 9), (32, 8, 4), (32, 8, 16), (64, 8, 64)],
)
def test_a_query_head_lies_with_its_kv_head_in_the_order_the_kernel_expects(
    heads: int, kv_heads: int, size: int
) -> None:
    seen: list[int] = []

    for share in shares(heads=heads, kv_heads=kv_heads, size=size):
        queries_per_kv_head = len(share.heads) // len(share.kv_heads)
        for place, head in enumerate(share.heads):
            assert share.kv_heads[place // queries_per_kv_head] == head // (heads // kv_heads)
        seen.extend(share.heads)

    assert seen == list(range(heads))


def test_more_ranks_than_kv_heads_keep_the_same_kv_head_with_other_queries() -> None:
    kept = [(list(share.heads), list(share.kv_heads)) for share in shares(heads=4, kv_heads=2, size=4)]

    assert kept == [([0], [0]), ([1], [0]), ([2], [1]), ([3], [1])]


def test_uneven_dimensions_are_cut_into_parts_that_differ_by_one() -> None:
    parts = shares(heads=4, kv_heads=4, size=4, inner=126, vocab=262)

    assert [part.token_ids.start for part in parts] == [0, 65, 131, 196]
    assert [len(part.token_ids) for part in parts] == [65, 66, 65, 66]
    assert [len(part.inner) for part in parts] == [31, 32, 31, 32]


def test_one_rank_keeps_all() -> None:
    (share,) = shares(heads=4, kv_heads=2, size=1)

    assert (len(share.heads), len(share.kv_heads), len(share.inner), len(share.token_ids)) == (4, 2, 128, 262)
    assert share.adds_bias


def test_a_sum_over_ranks_takes_one_bias() -> None:
    assert [share.adds_bias for share in shares(heads=4, kv_heads=4, size=4)] == [True, False, False, False]


def test_parts_of_less_than_one_each_are_empty_or_one() -> None:
    assert [len(cut(2, rank=rank, size=4)) for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (9, 3, 2, "tensor_parallel: 2 ranks and 3 KV heads do not divide each other"),
        (9, 3, 6, "tensor_parallel: 6 ranks do not divide 9 query heads"),
        (4, 2, 3, "tensor_parallel: 3 ranks and 2 KV heads do not divide each other"),
        (4, 1, 8, "tensor_parallel: 8 ranks do not divide 4 query heads"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused(
    heads: int, kv_heads: int, size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shares(heads=heads, kv_heads=kv_heads, size=size)


def test_a_vocabulary_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: 4 ranks are more than 3 token ids"):
        shares(heads=4, kv_heads=4, size=4, vocab=3)
