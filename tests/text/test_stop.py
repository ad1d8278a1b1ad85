"""StopMatcher: cut at the earliest stop string, leak none of it, hold back nothing else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.text.stop import StopMatcher


def cut_naively(text: str, stops: list[str]) -> tuple[str, str | None]:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        safe, matched = matcher.push(piece)
        shown += safe
        if matched is not None:
            break
    return shown + matcher.flush(), matcher.matched


QUICK = ["The qu", "ick br", "own fo", "x..."]


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["own fox"], ("The quick br", "own fox")),
        (["qui"], ("The ", "qui")),
        (["w"], ("The quick bro", "w")),
        (["own fox", "n f"], ("The quick br", "own fox")),
        (["brown", "bro"], ("The quick ", "bro")),
        (["own fob"], ("The quick brown fox...", None)),
        (["foxes", "zebra"], ("The quick brown fox...", None)),
        ([], ("The quick brown fox...", None)),
    ],
)
def test_stop_strings_are_found_across_pieces(stops: list[str], expected: tuple[str, str | None]) -> None:
    assert run(QUICK, stops) == expected


def test_a_near_miss_does_not_hide_the_match_that_follows_it() -> None:
    assert run(list("aaab"), ["aab"]) == ("a", "aab")
    assert run(list("ababac!"), ["abac"]) == ("ab", "abac")


def test_a_text_that_ends_with_part_of_a_stop_string_is_shown_whole() -> None:
    assert run(["hello wor"], ["world"]) == ("hello wor", None)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])

    assert matcher.push("abc<") == ("abc", None)
    assert matcher.push("/e") == ("", None)
    assert matcher.push("x<") == ("</ex", None)
    assert matcher.push("/end") == ("", None)
    assert matcher.push("> more") == ("", "</end>")
    assert matcher.flush() == ""


def test_a_match_waits_while_an_earlier_one_may_still_come() -> None:
    assert run(["abc", "dX"], ["bcdX", "c"]) == ("a", "bcdX")
    assert run(["abc", "dY"], ["bcdX", "c"]) == ("ab", "c")


def test_a_match_that_was_waiting_counts_when_the_text_ends() -> None:
    assert run(["abc"], ["bcdX", "c"]) == ("ab", "c")


@given(
    st.text("ab\U0001f600", max_size=40),
    st.lists(st.text("ab\U0001f600", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_the_result_is_the_naive_one_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]

    assert run(pieces, stops) == cut_naively(text, stops)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_held_text_is_always_a_proper_prefix_of_a_stop_string_or_waits_for_one(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, char in enumerate(text, start=1):
        safe, matched = matcher.push(char)
        shown += safe
        if matched is not None:
            return
        held = text[len(shown) : end]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
