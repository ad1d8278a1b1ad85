"""Coverage: agrees with a set of tokens, whatever the order of the ranges."""

from __future__ import annotations

import random

from kv_transfer.coverage import Coverage


def test_ranges_in_any_order_cover_what_the_set_of_their_tokens_covers() -> None:
    rng = random.Random(1)

    for _ in range(500):
        first, end = sorted(rng.sample(range(40), 2))
        coverage, tokens = Coverage(first_token=first, end_token=end), set()
        for _ in range(rng.randrange(12)):
            low = rng.randrange(first, end)
            high = rng.randrange(low + 1, end + 1)
            asked = set(range(low, high))
            assert coverage.num_missing(first_token=low, end_token=high) == len(asked - tokens)
            coverage.add(first_token=low, end_token=high)
            tokens |= asked
            assert coverage.is_whole == (len(tokens) == end - first)


def test_an_empty_range_is_whole_from_the_start() -> None:
    assert Coverage(first_token=7, end_token=7).is_whole
