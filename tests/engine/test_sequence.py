"""SequenceState: the table of legal moves is the whole truth."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests import toys
from twinpool.engine.sequence import LEGAL_MOVES, SequenceState, SequenceStatus


def sequence(
    *, status: SequenceStatus = SequenceStatus.WAITING, has_destination: bool = False
) -> SequenceState:
    return SequenceState(
        number=0, request=toys.request(), arrived_s=5.0, status=status, has_destination=has_destination
    )


def test_the_table_knows_every_status() -> None:
    assert set(LEGAL_MOVES) == set(SequenceStatus)


def test_every_status_can_be_reached_and_can_end() -> None:
    def reachable(start: SequenceStatus) -> set[SequenceStatus]:
        found = {start}
        while new := {target for status in found for target in LEGAL_MOVES[status]} - found:
            found |= new
        return found

    from_start = reachable(SequenceStatus.WAITING) | reachable(SequenceStatus.RECEIVING)
    assert from_start == set(SequenceStatus)
    assert all(SequenceStatus.FINISHED in reachable(status) for status in SequenceStatus)
    assert LEGAL_MOVES[SequenceStatus.FINISHED] == frozenset()


@pytest.mark.parametrize(("source", "target"), list(itertools.product(SequenceStatus, SequenceStatus)))
def test_a_move_is_made_if_the_table_has_it_and_refused_otherwise(
    source: SequenceStatus, target: SequenceStatus
) -> None:
    state = sequence(status=source)

    if target in LEGAL_MOVES[source]:
        state.move_to(target)
        assert state.status is target
    else:
        with pytest.raises(AssertionError, match=f"{source} -> {target} is no legal move"):
            state.move_to(target)
        assert state.status is source


def test_no_sequence_is_both_preemptible_and_under_a_transfer() -> None:
    for status, has_destination in itertools.product(SequenceStatus, (False, True)):
        state = sequence(status=status, has_destination=has_destination)
        assert not (state.is_preemptible and state.is_under_transfer)


def test_earlier_output_is_known_but_not_prompt() -> None:
    request = replace(toys.request((1, 2, 3), max_tokens=9, timeout_s=1.0), output_ids=(7,))

    state = SequenceState(number=0, request=request, arrived_s=5.0)

    assert state.token_ids == [1, 2, 3, 7]
    assert (state.num_prompt_tokens, state.num_output_tokens, state.num_uncomputed_tokens) == (3, 1, 4)
    assert state.deadline_s == 6.0


def test_the_last_token_needs_no_room() -> None:
    only = SequenceState(number=0, request=toys.request((1, 2, 3), max_tokens=1), arrived_s=0.0)
    more = SequenceState(number=1, request=toys.request((1, 2, 3), max_tokens=2), arrived_s=0.0)
    leaves = SequenceState(number=2, request=more.request, arrived_s=0.0, has_destination=True)

    assert [only.num_start_tokens, more.num_start_tokens, leaves.num_start_tokens] == [3, 4, 3]
