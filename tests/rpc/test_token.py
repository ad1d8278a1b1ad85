"""The token of a call: made by one party with the secret, for one method of one callee, now, and once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.errors import Untrusted
from twinpool.core.secret import Secret
from twinpool.core.tls import Party
from twinpool.rpc.token import WINDOW_S, TokenCheck, make_token

SECRET = Secret(b"a secret of the deployment")
METHOD = "/twinpool.v1.Decode/Reserve"
NOW_S = 1_800_000_000.0


class Wall:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def token(
    secret: Secret = SECRET,
    *,
    caller: Party = Party.ROUTER,
    audience: str = "decode-0",
    method: str = METHOD,
    unix_s: float = NOW_S,
) -> str:
    return make_token(secret, caller=caller, audience=audience, method=method, unix_s=unix_s)


def a_check(wall: Wall | None = None, steady: Wall | None = None) -> TokenCheck:
    wall = wall or Wall()
    return TokenCheck(SECRET, caller=Party.ROUTER, audience="decode-0", unix_s=wall, now_s=steady or wall)


def test_the_token_of_a_call_is_taken_once() -> None:
    check = a_check()
    first, second = token(), token()

    check.check(first, METHOD)
    check.check(second, METHOD)
    for used in (first, second):
        with pytest.raises(Untrusted, match="the call's token was used before"):
            check.check(used, METHOD)


@pytest.mark.parametrize(
    "other",
    [
        token(Secret(b"another secret, as long")),
        token(caller=Party.WORKER),
        token(audience="decode-1"),
        token(method="/twinpool.v1.Worker/Drain"),
    ],
    ids=["secret", "direction", "callee", "method"],
)
def test_the_token_of_another_call_is_refused(other: str) -> None:
    with pytest.raises(Untrusted, match="no router with the same secret made the call's token for decode-0"):
        a_check().check(other, METHOD)


def test_clocks_may_differ_by_the_window_and_no_more() -> None:
    for ago_s in (-WINDOW_S, WINDOW_S):
        a_check().check(token(unix_s=NOW_S - ago_s), METHOD)
    for ago_s in (-WINDOW_S - 1, WINDOW_S + 1):
        with pytest.raises(Untrusted, match=rf"is of {ago_s} s ago, 60 are allowed: the clocks"):
            a_check().check(token(unix_s=NOW_S - ago_s), METHOD)


def test_no_token_can_be_used_again_at_any_later_time() -> None:
    wall = Wall()
    check = a_check(wall)
    early = token(unix_s=NOW_S + WINDOW_S)  # of a clock that is ahead: valid for the longest time
    check.check(early, METHOD)

    for _ in range(4 * WINDOW_S):
        wall.now_s += 1.0
        check.check(token(unix_s=wall.now_s), METHOD)  # makes the check forget what is old
        with pytest.raises(Untrusted):
            check.check(early, METHOD)


def test_what_is_remembered_of_tokens_has_an_end() -> None:
    wall = Wall()
    check = a_check(wall)

    for _ in range(10 * WINDOW_S):
        wall.now_s += 1.0
        check.check(token(unix_s=wall.now_s), METHOD)

    assert len(check._seen) <= 2 * WINDOW_S + 1


def test_what_is_remembered_has_an_end_although_the_clock_was_put_back() -> None:
    wall, steady = Wall(), Wall()
    check = a_check(wall, steady)
    wall.now_s += 365 * 86400.0
    check.check(token(unix_s=wall.now_s), METHOD)
    wall.now_s = NOW_S

    for _ in range(10 * WINDOW_S):
        wall.now_s, steady.now_s = wall.now_s + 1.0, steady.now_s + 1.0
        check.check(token(unix_s=wall.now_s), METHOD)

    assert len(check._seen) <= 2 * WINDOW_S + 1


def test_a_stranger_is_not_remembered() -> None:
    check = a_check()

    for _ in range(100):
        with pytest.raises(Untrusted):
            check.check(token(Secret(b"another secret, as long")), METHOD)

    assert check._seen == {}


@given(st.text(max_size=200))
def test_text_of_any_kind_is_no_token(text: str) -> None:
    with pytest.raises(Untrusted):
        a_check().check(text, METHOD)


def test_no_token_is_none() -> None:
    with pytest.raises(Untrusted, match="the call carries no token: its caller has no secret"):
        a_check().check(None, METHOD)


def test_a_token_with_one_letter_changed_is_refused() -> None:
    whole = token()
    for place in range(len("twinpool "), len(whole)):
        changed = whole[:place] + ("1" if whole[place] == "0" else "0") + whole[place + 1 :]
        with pytest.raises(Untrusted):
            a_check().check(changed, METHOD)
