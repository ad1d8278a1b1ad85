"""KV is shared within a tenant and a salt, and usage says how much of a prompt was not computed."""

from __future__ import annotations

from typing import Any

import pytest

from router.http.prepare import cache_salt
from tests.router_http.toys import Site

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": [{"role": "user", "content": "abc"}]})]


def salt_of(site: Site, path: str, body: dict[str, Any]) -> str:
    assert site.post(path, body).status == 200
    return site.worker.requests[-1].cache_salt


def cached(reply: Any) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_requests_share_a_salt_only_if_they_agree_in_user_and_salt(
    site: Site, path: str, body: dict[str, Any]
) -> None:
    askers: list[dict[str, Any]] = [
        {}, {"user": "a"}, {"user": "b"}, {"cache_salt": "a"}, {"user": "a", "cache_salt": "b"},
        {"user": "ab"}, {"user": "a", "cache_salt": "a"}, {"user": "\u00e4"}, {"user": "a" * 10_000},
    ]  # fmt: skip

    salts = [salt_of(site, path, body | asker) for asker in askers]
    again = [salt_of(site, path, body | asker) for asker in askers]

    assert salts == again
    assert len(set(salts)) == len(askers)
    assert salts[0] == ""
    assert {len(salt) for salt in salts[1:]} == {32}


def test_a_salt_cannot_be_written_so_that_it_looks_like_another_tenant() -> None:
    assert cache_salt("a", 'b"') != cache_salt('a", "b"', "")
    assert cache_salt("", "a") != cache_salt("a", "")


def test_null_and_no_salt_are_the_same(site: Site) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": "a", "cache_salt": None, "user": None}]

    assert [salt_of(site, COMPLETIONS, body) for body in bodies] == ["", ""]


@pytest.mark.parametrize("value", ["", "x" * 257, 5, ["a"], {}])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_salt_that_is_none_is_refused(site: Site, path: str, body: dict[str, Any], value: object) -> None:
    reply = site.post(path, body | {"cache_salt": value})

    assert (reply.status, reply.json["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("num_cached", [0, 2])
def test_usage_tells_what_was_not_computed_in_whole_answers_and_in_streams(
    site: Site, path: str, body: dict[str, Any], num_cached: int
) -> None:
    site.worker.cached_tokens = [num_cached, num_cached]

    whole = site.post(path, body).json
    stream = site.post(path, body | {"stream": True, "stream_options": {"include_usage": True}}).events

    assert (cached(whole), cached(stream[-2])) == (num_cached, num_cached)


@pytest.mark.parametrize(
    ("fields", "by_choice", "num_cached"),
    [
        ({"n": 3}, [2, 0, 2], 0),  # one computed it, and the others found it there
        ({"n": 3}, [2, 2, 2], 2),
        ({"prompt": ["abc", "abd"]}, [1, 2], 3),
        ({"prompt": ["abc", "abd"], "n": 2}, [2, 2, 2, 2], 4),
    ],
)
def test_each_prompt_is_counted_once_as_its_coldest_choice_had_it(
    site: Site, fields: dict[str, Any], by_choice: list[int], num_cached: int
) -> None:
    site.worker.cached_tokens = by_choice

    usage = site.post(COMPLETIONS, {"prompt": "abc"} | fields).json["usage"]

    assert usage["prompt_tokens_details"] == {"cached_tokens": num_cached}
    assert num_cached <= usage["prompt_tokens"]
