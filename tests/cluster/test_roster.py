"""Roster: pools keep their sizes as roles change, and who came last leaves first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinpool.cluster.roster import Member, Roster, Wanted
from twinpool.core.config import bind, unbind
from twinpool.core.ports import Role

PREFILL, DECODE, COLOCATED = Role.PREFILL, Role.DECODE, Role.COLOCATED


def ids(roster: Roster, role: Role) -> list[str]:
    return [member.worker_id for member in roster.members if member.role is role]


def test_the_first_workers_are_named_after_their_pools() -> None:
    roster = Roster({PREFILL: 1, DECODE: 2, COLOCATED: 0})

    assert roster.members == (
        Member(worker_id="prefill-0", pool=PREFILL, role=PREFILL),
        Member(worker_id="decode-0", pool=DECODE, role=DECODE),
        Member(worker_id="decode-1", pool=DECODE, role=DECODE),
    )


def test_a_change_of_role_moves_a_worker_from_one_pool_size_to_the_other() -> None:
    roster = Roster({PREFILL: 1, DECODE: 2})

    roster.assign("decode-0", PREFILL, generation=8)

    assert (roster.count(PREFILL), roster.count(DECODE)) == (2, 1)
    assert roster.members[-1] == Member(worker_id="decode-0", pool=DECODE, role=PREFILL, changed_generation=8)


def test_scaling_after_a_change_adds_under_a_free_name_and_takes_who_came_last() -> None:
    roster = Roster({PREFILL: 1, DECODE: 2})
    roster.assign("decode-0", PREFILL, generation=8)

    roster.scale(PREFILL, 3)
    assert ids(roster, PREFILL) == ["prefill-0", "decode-0", "prefill-1"]
    roster.scale(PREFILL, 2)
    assert ids(roster, PREFILL) == ["prefill-0", "decode-0"]
    roster.scale(DECODE, 2)
    assert ids(roster, DECODE) == ["decode-1", "decode-2"]


def test_the_name_of_a_worker_that_left_in_another_role_is_not_given_again() -> None:
    roster = Roster({PREFILL: 1, DECODE: 2})
    roster.assign("decode-0", PREFILL, generation=8)

    roster.scale(PREFILL, 1)
    roster.scale(DECODE, 2)

    assert [ids(roster, PREFILL), ids(roster, DECODE)] == [["prefill-0"], ["decode-1", "decode-2"]]


def test_a_worker_that_is_not_wanted_is_left_alone() -> None:
    roster = Roster({PREFILL: 1, DECODE: 1})

    roster.assign("by-hand", DECODE, generation=8)

    assert [member.worker_id for member in roster.members] == ["prefill-0", "decode-0"]


def test_processes_tell_each_other_the_same() -> None:
    roster = Roster({PREFILL: 1, DECODE: 1})
    roster.assign("decode-0", COLOCATED, generation=2**50)

    assert bind(Wanted, unbind(Wanted(workers=roster.members))).workers == roster.members


ORDERS = st.one_of(
    st.tuples(st.just("scale"), st.sampled_from(list(Role)), st.integers(0, 4)),
    st.tuples(st.just("assign"), st.sampled_from(list(Role)), st.integers(0, 20)),
)


@given(st.lists(ORDERS, max_size=40))
def test_sizes_are_as_ordered_and_names_are_unique(orders: list[tuple[str, Role, int]]) -> None:
    roster = Roster({PREFILL: 1, DECODE: 2})
    sizes = {PREFILL: 1, DECODE: 2, COLOCATED: 0}
    for generation, (order, role, number) in enumerate(orders, start=1):
        if order == "scale":
            roster.scale(role, number)
            sizes[role] = number
        elif roster.members:
            member = roster.members[number % len(roster.members)]
            roster.assign(member.worker_id, role, generation=generation)
            sizes[member.role] -= 1
            sizes[role] += 1

        assert {role: roster.count(role) for role in Role} == sizes
        assert len({member.worker_id for member in roster.members}) == sum(sizes.values())
        assert all(member.worker_id.startswith(f"{member.pool}-") for member in roster.members)
