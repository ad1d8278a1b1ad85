"""PrefixCache: a block is found by all that came before it, and a digest alone proves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.engine.prefix_cache import BlockName, PrefixCache


def names(cache: PrefixCache, *token_ids: int, salt: str = "") -> list[BlockName]:
    found: list[BlockName] = []
    cache.extend(found, token_ids, salt=salt)
    return found


def filled(*, salt: str = "") -> tuple[PrefixCache, list[BlockName]]:
    """A cache of blocks of two tokens: block 10 holds 1 2, and block 11, after it, 3 4."""
    cache = PrefixCache(2)
    first, second = names(cache, 1, 2, 3, 4, salt=salt)
    assert cache.add(10, first, after=None)
    assert cache.add(11, second, after=10)
    return cache, [first, second]


def test_full_blocks_have_names_and_the_rest_has_none() -> None:
    cache = PrefixCache(16)

    counts = [len(names(cache, *range(num_tokens))) for num_tokens in (0, 15, 16, 17, 63, 64, 65)]

    assert counts == [0, 0, 1, 1, 3, 4, 4]


def test_names_that_grow_with_a_sequence_are_those_of_the_whole() -> None:
    cache = PrefixCache(2)
    grown: list[BlockName] = []

    for num_tokens in range(8):
        cache.extend(grown, range(num_tokens), salt="s")

    assert grown == names(cache, *range(7), salt="s")


def test_the_longest_prefix_is_found_in_order() -> None:
    cache, _ = filled()

    found = [
        cache.find(names(cache, *ids)) for ids in ((1, 2, 3, 4, 5, 6), (1, 2, 3, 5), (1, 2), (0, 2, 3, 4))
    ]

    assert found == [[10, 11], [10], [10], []]


def test_equal_tokens_after_different_ones_are_not_the_same() -> None:
    cache, _ = filled()

    assert cache.find(names(cache, 3, 4)) == []
    assert cache.find(names(cache, 1, 9, 3, 4)) == []


def test_a_salt_finds_its_own_blocks_only() -> None:
    cache, _ = filled(salt="a")

    assert cache.find(names(cache, 1, 2, 3, 4, salt="a")) == [10, 11]
    assert cache.find(names(cache, 1, 2, 3, 4, salt="b")) == []
    assert cache.find(names(cache, 1, 2, 3, 4)) == []


def test_two_starts_give_one_prompt_two_names() -> None:
    assert names(PrefixCache(2), 1, 2) != names(PrefixCache(2), 1, 2)


@pytest.mark.parametrize("forged", [{"tokens": bytes(8)}, {"salt": "other"}])
def test_a_digest_that_meets_another_content_finds_nothing(forged: dict[str, object]) -> None:
    cache, (first, second) = filled()

    assert cache.find([replace(first, **forged), second]) == []  # type: ignore[arg-type]
    assert cache.find([first, replace(second, **forged)]) == [10]  # type: ignore[arg-type]


def test_a_digest_that_meets_another_content_cannot_be_added_nor_what_follows_it() -> None:
    cache, (first, second) = filled()
    collision = replace(first, tokens=bytes(8))

    assert not cache.add(20, collision, after=None)
    assert not cache.add(21, second, after=20)
    assert cache.find([first, second]) == [10, 11]


def test_the_same_tokens_after_another_block_of_the_same_digest_are_not_found() -> None:
    """The second name is what a collision of the first one would give."""
    cache, (_, second) = filled()

    assert cache.find([second]) == []
    assert not cache.add(20, second, after=None)


def test_a_block_is_found_as_long_as_one_of_its_twins_is_there() -> None:
    cache, (first, _) = filled()
    assert cache.add(20, first, after=None)

    twins = (cache.twins(10), cache.twins(20))
    cache.remove(10)

    assert twins == ([20], [10])
    assert cache.find(names(cache, 1, 2, 3, 4)) == [20, 11]


def test_a_block_cannot_be_forgotten_before_those_that_follow_it() -> None:
    cache, _ = filled()

    with pytest.raises(AssertionError, match="block 10 is forgotten before those that follow it"):
        cache.remove(10)


def test_a_block_has_one_content() -> None:
    cache, (first, _) = filled()

    with pytest.raises(AssertionError, match="block 10 can be found already"):
        cache.add(10, first, after=None)
