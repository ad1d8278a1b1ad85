"""Scheduler policies: each file is found by its name, keeps the contract, and orders as it says."""

from __future__ import annotations

import pytest

from tests import toys
from twinpool.core.errors import ConfigError
from twinpool.engine.plan import QueueView
from twinpool.engine.policy import load_policy, policy_names
from twinpool.engine.sequence import SequenceState


def view() -> QueueView:
    """Six sequences: two waiting, two with 3 of 8 tokens left, two decoding."""

    def sequence(number: int, num_computed_tokens: int) -> SequenceState:
        return SequenceState(
            number=number,
            request=toys.request((1,) * 8, request_id=str(number)),
            arrived_s=float(number),
            num_computed_tokens=num_computed_tokens,
        )

    return QueueView(
        now_s=10.0,
        waiting=(sequence(4, 0), sequence(5, 0)),
        prefilling=(sequence(2, 5), sequence(3, 5)),
        decoding=(sequence(0, 7), sequence(1, 7)),
    )


def offers(name: str) -> list[tuple[str, int]]:
    return [
        (work.sequence.request.request_id, work.num_tokens) for work in load_policy(name).candidates(view())
    ]


def test_the_policies_are_the_files_of_the_folder() -> None:
    assert policy_names() == ("decode_first", "prefill_first")


def test_an_unknown_policy_is_a_config_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.policy: fifo is none of decode_first, prefill_first$"):
        load_policy("fifo")


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_offers_everything_once_and_oldest_first_in_its_kind(name: str) -> None:
    offered = offers(name)

    assert sorted(offered) == [("0", 1), ("1", 1), ("2", 3), ("3", 3), ("4", 8), ("5", 8)]
    order = [request_id for request_id, _ in offered]
    assert order.index("0") < order.index("1")
    assert order.index("2") < order.index("3") < order.index("4") < order.index("5")


def test_decode_first_starts_with_decodes() -> None:
    assert [request_id for request_id, _ in offers("decode_first")] == ["0", "1", "2", "3", "4", "5"]


def test_prefill_first_ends_with_decodes() -> None:
    assert [request_id for request_id, _ in offers("prefill_first")] == ["2", "3", "4", "5", "0", "1"]
