"""Stories: hidden time and concurrency, by numbers that can be added up by hand."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.lab.study.stories import Phase, at_once, phases, transfer_use


def story(
    *spans: tuple[str, float, float | None], first_token: float | None = 1.0, sent: float = 10.0
) -> dict[str, Any]:
    return {
        "index": 0,
        "sent_s": sent,
        "spans": [{"name": name, "start_s": start, "end_s": end} for name, start, end in spans],
        "events": [] if first_token is None else [{"name": "first_token", "at_s": first_token}],
        "kv_bytes": 1000,
    }


def test_what_moves_while_the_prompt_is_computed_is_hidden() -> None:
    # 0.75 s of the first transfer lie before its first token at 1.0 s, 0.25 s after; and all of the second.
    use = transfer_use([story(("transfer", 0.25, 1.25)), story(("transfer", 0.5, 0.75))])

    assert (use.transfers, use.kv_bytes) == (2, 2000)
    assert (use.total_s, use.hidden_s) == (1.25, 1.0)
    assert use.hidden_share == 0.8


def test_a_transfer_after_the_first_token_hides_nothing() -> None:
    use = transfer_use([story(("transfer", 1.5, 2.0))])

    assert (use.total_s, use.hidden_s, use.hidden_share) == (0.5, 0.0, 0.0)


def test_without_a_transfer_there_is_no_share() -> None:
    assert transfer_use([story(("prefill", 0.0, 1.0))]).hidden_share is None


def test_phases_are_in_the_time_of_the_cell_and_those_that_never_ended_are_left_out() -> None:
    told = story(("queue", 0.0, 0.5), ("decode", 1.0, None), sent=3.0)

    assert list(phases(told)) == [Phase(name="queue", start_s=3.0, end_s=3.5)]


def test_concurrency_is_a_mean_over_each_bin() -> None:
    # Bins of 1 s. The first stretch fills half of bin 0 and all of bin 1; the second a quarter of bin 1.
    assert at_once([(0.5, 2.0), (1.25, 1.5)], end_s=4.0, bins=4) == pytest.approx([0.5, 1.25, 0.0, 0.0])


def test_what_goes_on_after_the_last_bin_is_cut() -> None:
    assert at_once([(-1.0, 9.0)], end_s=2.0, bins=2) == pytest.approx([1.0, 1.0])
