"""Pools: whatever dies, scales or finds no room, the running workers end up equal to the wanted ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.cluster.pools import Backoff, Life, LifeState, Phase, Pools, WorkerReport
from twinpool.cluster.roster import Member, Roster
from twinpool.core.clock import ManualClock
from twinpool.core.ports import Role


class FakeMachines:
    """Room for ``room`` workers; a worker runs, ends and drains when the test says so."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.states: dict[Life, LifeState] = {}
        self.stopping: set[Life] = set()
        self.forgotten: list[str] = []

    def start(self, lives: Sequence[Life]) -> Mapping[str, str]:
        why_not = {}
        for life in lives:
            if len(self.live()) >= self.room:
                why_not[life.worker_id] = "no room"
                continue
            assert life not in self.states, f"{life} starts twice"
            same_id = [other for other in self.live() if other.worker_id == life.worker_id]
            assert not same_id, f"{life} starts beside {same_id}"
            assert all(life.generation > other.generation for other in self.states), "generations go up"
            self.states[life] = LifeState()
        return why_not

    def stop(self, life: Life) -> None:
        self.stopping.add(life)

    def state(self, life: Life) -> LifeState:
        return self.states[life]

    def forget(self, worker_id: str) -> None:
        assert all(life.worker_id != worker_id for life in self.live()), f"{worker_id} still runs"
        self.forgotten.append(worker_id)

    def live(self) -> list[Life]:
        return [life for life, state in self.states.items() if state.phase is not Phase.ENDED]

    def all_join(self) -> None:
        for life in self.live():
            self.states[life] = LifeState(phase=Phase.RUNNING, pid=1)

    def end(self, life: Life, reason: str = "killed by signal 9") -> None:
        self.states[life] = LifeState(phase=Phase.ENDED, detail=reason)

    def drain(self, life: Life) -> None:
        self.states[life] = LifeState(phase=Phase.ENDED, detail="drained", is_drained=True)

    def finish_draining(self) -> None:
        for life in self.live():
            if life in self.stopping:
                self.drain(life)

    def by_id(self, worker_id: str) -> Life:
        (life,) = [life for life in self.live() if life.worker_id == worker_id]
        return life


def workers(prefill: int, decode: int) -> tuple[Member, ...]:
    return Roster({Role.PREFILL: prefill, Role.DECODE: decode}).members


def started(
    prefill: int = 1, decode: int = 1, *, room: int = 100, start_timeout_s: float = 600.0
) -> tuple[Pools, FakeMachines, ManualClock]:
    machines, clock = FakeMachines(room), ManualClock()
    pools = Pools(
        workers(prefill, decode),
        machines,
        clock,
        first_generation=7,
        backoff=Backoff(first_s=1.0, max_s=8.0, healthy_s=60.0),
        start_timeout_s=start_timeout_s,
    )
    pools.tick()
    return pools, machines, clock


def report_of(pools: Pools, worker_id: str) -> WorkerReport:
    (report,) = [report for report in pools.report() if report.worker_id == worker_id]
    return report


def test_every_wanted_worker_starts_with_a_generation_of_its_own() -> None:
    _, machines, _ = started(2, 1)

    assert [(life.worker_id, life.role, life.generation) for life in machines.live()] == [
        ("prefill-0", Role.PREFILL, 7),
        ("prefill-1", Role.PREFILL, 8),
        ("decode-0", Role.DECODE, 9),
    ]


def test_a_worker_that_dies_is_replaced_at_the_next_tick() -> None:
    pools, machines, _ = started()
    machines.all_join()
    pools.tick()

    machines.end(machines.by_id("decode-0"))
    pools.tick()

    assert machines.by_id("decode-0").generation == 9
    assert report_of(pools, "decode-0").num_failures == 1


def test_one_that_keeps_dying_waits_longer_each_time_and_says_why() -> None:
    pools, machines, clock = started(0, 1)
    waits = []
    for _ in range(6):
        machines.end(machines.by_id("decode-0"), "exit 1: no memory")
        died_s = clock.now_s()
        pools.tick()
        if not machines.live():
            assert report_of(pools, "decode-0").state == "waiting"
            assert report_of(pools, "decode-0").detail == "exit 1: no memory"
        while not machines.live():
            clock.advance(0.5)
            pools.tick()
        waits.append(clock.now_s() - died_s)

    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_long_healthy_life_ends_the_row_of_failures() -> None:
    pools, machines, clock = started(0, 1)
    for _ in range(2):
        machines.end(machines.by_id("decode-0"))
        pools.tick()
        clock.advance(10.0)
        pools.tick()
    machines.all_join()
    pools.tick()

    clock.advance(61.0)
    machines.end(machines.by_id("decode-0"))
    pools.tick()

    assert len(machines.live()) == 1


def test_one_that_somebody_else_drains_is_replaced_at_once_and_counts_no_failure() -> None:
    pools, machines, _ = started(0, 1)
    for generation in (8, 9, 10):
        machines.drain(machines.by_id("decode-0"))  # sooner than a tick could see that it had joined
        pools.tick()

        assert machines.by_id("decode-0").generation == generation
    assert report_of(pools, "decode-0").num_failures == 0


def test_a_long_healthy_life_that_is_replaced_ends_the_row_of_failures_too() -> None:
    pools, machines, clock = started(0, 1)
    for _ in range(2):
        machines.end(machines.by_id("decode-0"))
        pools.tick()
        clock.advance(10.0)
        pools.tick()
    machines.all_join()
    pools.tick()
    clock.advance(61.0)
    pools.replace("decode-0")
    machines.finish_draining()
    pools.tick()

    machines.end(machines.by_id("decode-0"))
    pools.tick()

    assert len(machines.live()) == 1


def test_scaling_down_drains_the_highest_number_and_scaling_up_fills_it_again() -> None:
    pools, machines, _ = started(3, 0)
    machines.all_join()

    pools.want(workers(1, 0))
    pools.tick()
    assert {life.worker_id for life in machines.stopping} == {"prefill-1", "prefill-2"}
    assert report_of(pools, "prefill-2").state == "stopping"

    pools.want(workers(2, 0))
    pools.tick()
    machines.finish_draining()
    pools.tick()
    pools.tick()

    assert {life.worker_id for life in machines.live()} == {"prefill-0", "prefill-1"}
    assert machines.by_id("prefill-1").generation == 10
    assert report_of(pools, "prefill-1").num_failures == 0


def test_a_replaced_worker_drains_first_and_counts_no_failure() -> None:
    pools, machines, _ = started(0, 1)
    machines.all_join()

    pools.replace("decode-0")
    pools.tick()
    assert [life.generation for life in machines.live()] == [7]
    machines.finish_draining()
    pools.tick()

    assert [life.generation for life in machines.live()] == [8]
    assert report_of(pools, "decode-0").num_failures == 0


def test_one_without_room_waits_and_starts_when_there_is_some() -> None:
    pools, machines, _ = started(2, 0, room=1)
    assert report_of(pools, "prefill-1") == WorkerReport(
        worker_id="prefill-1",
        role=Role.PREFILL,
        state="waiting",
        generation=None,
        detail="no room",
        num_failures=0,
    )

    machines.room = 2
    pools.tick()

    assert {life.worker_id for life in machines.live()} == {"prefill-0", "prefill-1"}


def test_one_that_never_reaches_the_router_is_stopped_and_counts_as_failed() -> None:
    pools, machines, clock = started(0, 1, start_timeout_s=5.0)

    clock.advance(5.5)
    pools.tick()
    machines.finish_draining()
    pools.tick()

    assert report_of(pools, "decode-0").num_failures == 1
    assert machines.by_id("decode-0").generation == 8


def test_nothing_wanted_and_nothing_running_is_empty() -> None:
    pools, machines, _ = started(1, 1)
    pools.want(())
    pools.tick()
    assert not pools.is_empty

    machines.finish_draining()
    pools.tick()

    assert pools.is_empty
    assert machines.forgotten == ["prefill-0", "decode-0"]


EVENTS = st.one_of(
    st.tuples(st.just("die"), st.integers(0, 9)),
    st.tuples(st.just("scale prefill"), st.integers(0, 4)),
    st.tuples(st.just("scale decode"), st.integers(0, 4)),
    st.tuples(st.just("replace"), st.integers(0, 9)),
    st.tuples(st.just("change"), st.integers(0, 9)),
    st.tuples(st.just("room"), st.integers(0, 8)),
    st.tuples(st.sampled_from(["join", "drain", "tick", "wait"]), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_the_pools_come_to_rest_as_wanted(events: list[tuple[str, int]]) -> None:
    pools, machines, clock = started(2, 2)
    roster = Roster({Role.PREFILL: 2, Role.DECODE: 2})
    actual: dict[Life, Role] = {}  # roles that lives took while they ran
    for name, number in events:
        live = machines.live()
        if name == "die" and live:
            machines.end(live[number % len(live)])
        elif name == "replace" and live:
            pools.replace(live[number % len(live)].worker_id)
        elif name == "change" and live:
            life = live[number % len(live)]
            role = Role.DECODE if actual.get(life, life.role) is Role.PREFILL else Role.PREFILL
            if life not in machines.stopping and any(m.worker_id == life.worker_id for m in roster.members):
                actual[life] = role
                roster.assign(life.worker_id, role, generation=life.generation)
        elif name.startswith("scale"):
            roster.scale(Role(name.split()[1]), number)
        elif name == "room":
            machines.room = number
        elif name == "join":
            machines.all_join()
        elif name == "drain":
            machines.finish_draining()
        elif name == "wait":
            clock.advance(3.0)
        if name == "tick" or number % 3:  # the controller hears of several orders at once
            pools.want(roster.members)
            pools.tick()

    machines.room = 100
    for _ in range(5):
        pools.want(roster.members)
        machines.all_join()
        machines.finish_draining()
        clock.advance(10.0)
        pools.tick()

    expected = {member.worker_id: (member.pool, member.role) for member in roster.members}
    assert {life.worker_id: (life.pool, actual.get(life, life.role)) for life in machines.live()} == expected
    assert {report.worker_id: report.role for report in pools.report()} == {
        worker_id: role for worker_id, (_, role) in expected.items()
    }


def changed(worker_id: str, role: Role, *, generation: int) -> tuple[Member, ...]:
    """One prefill and two decode workers, of which one took another role."""
    roster = Roster({Role.PREFILL: 1, Role.DECODE: 2})
    roster.assign(worker_id, role, generation=generation)
    return roster.members


def test_a_worker_that_took_another_role_goes_on_and_its_next_life_has_it_too() -> None:
    pools, machines, _ = started(1, 2)
    machines.all_join()
    life = machines.by_id("decode-1")

    pools.want(changed("decode-1", Role.PREFILL, generation=life.generation))
    pools.tick()

    assert (machines.by_id("decode-1"), machines.stopping) == (life, set())
    assert report_of(pools, "decode-1").role is Role.PREFILL

    machines.end(life)
    pools.tick()

    assert machines.by_id("decode-1") == Life(
        worker_id="decode-1", pool=Role.DECODE, role=Role.PREFILL, generation=10
    )


def test_a_life_that_began_before_its_role_was_known_is_replaced() -> None:
    pools, machines, _ = started(1, 2)
    machines.all_join()
    first = machines.by_id("decode-1")
    machines.end(first)  # just after it took its new role
    pools.tick()
    machines.all_join()

    pools.want(changed("decode-1", Role.PREFILL, generation=first.generation))
    pools.tick()
    assert {life.generation for life in machines.stopping} == {10}
    machines.finish_draining()
    pools.tick()

    assert (machines.by_id("decode-1").role, machines.by_id("decode-1").generation) == (Role.PREFILL, 11)
    assert report_of(pools, "decode-1").num_failures == 1


@pytest.mark.parametrize(
    ("num_failures", "delay_s"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 2.0), (10_000, 30.0)]
)
def test_the_backoff_doubles_up_to_its_limit(num_failures: int, delay_s: float) -> None:
    assert Backoff().delay_s(num_failures) == delay_s
