"""Request.continued: a continued request asks for exactly what is missing."""

from __future__ import annotations

from tests.toys import request
from twinpool.core.request import TokenOutput


def test_a_continued_request_carries_every_token_the_client_has_seen() -> None:
    first_try = request((5, 6, 7), max_tokens=8)
    sent = [TokenOutput(index=0, token_id=11), TokenOutput(index=1, token_id=12)]

    second_try = first_try.continued(sent, request_id="r0.2", timeout_s=3.0)
    third_try = second_try.continued([TokenOutput(index=2, token_id=13)], request_id="r0.3", timeout_s=2.0)

    assert second_try.output_ids == (11, 12)
    assert third_try.output_ids == (11, 12, 13)
    assert third_try.prompt_ids == (5, 6, 7)
    assert third_try.sampling == first_try.sampling
    assert (third_try.request_id, third_try.timeout_s) == ("r0.3", 2.0)


def test_the_last_token_never_needs_kv() -> None:
    once = request((1, 2, 3), max_tokens=1)
    longer = request((1, 2, 3), max_tokens=5)

    assert once.max_total_tokens == 3
    assert longer.max_total_tokens == 7
    assert longer.continued([TokenOutput(index=0, token_id=9)], request_id="x", timeout_s=1).num_tokens == 4
