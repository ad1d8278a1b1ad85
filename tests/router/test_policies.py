"""Routing policies: every file in router/policies keeps the rules; each has its own way to spread."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections import Counter

import pytest

import router.policies
from router.policies.least_loaded import LeastLoaded
from router.policies.round_robin import RoundRobin
from router.policy import Placement, Snapshot, WorkerView, load_policy
from tests.toys import request
from twinpool.core.errors import ConfigError

POLICIES = sorted(module.name for module in pkgutil.iter_modules(router.policies.__path__))


def view(worker_id: str, **changes: int) -> WorkerView:
    worker = WorkerView(
        worker_id=worker_id,
        in_flight=0,
        limit=4,
        in_flight_tokens=0,
        free_blocks=32,
        num_blocks=32,
        block_tokens=16,
        max_request_tokens=256,
    )
    return worker._replace(**changes)  # type: ignore[arg-type]


def views(kind: str, number: int, **changes: int) -> tuple[WorkerView, ...]:
    return tuple(view(f"{kind}{i}", **changes) for i in range(number))


def test_both_promised_policies_are_there() -> None:
    assert {"round_robin", "least_loaded"} <= set(POLICIES)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"router.policy: fastest is none of least_loaded, round_robin"):
        load_policy("fastest")


@pytest.mark.parametrize("name", POLICIES)
class TestEveryPolicy:
    def test_keeps_prefill_and_decode_apart(self, name: str) -> None:
        snapshot = Snapshot(prefill=views("p", 1), decode=views("d", 1))

        assert load_policy(name).choose(request(), snapshot) == Placement(decode="d0", prefill="p0")

    def test_lets_a_colocated_worker_do_everything(self, name: str) -> None:
        snapshot = Snapshot(colocated=views("c", 1))

        assert load_policy(name).choose(request(), snapshot) == Placement(decode="c0")

    def test_waits_for_a_prefill_worker_that_is_there_but_full(self, name: str) -> None:
        snapshot = Snapshot(prefill=views("p", 1, in_flight=4), decode=views("d", 1))

        assert load_policy(name).choose(request(), snapshot) is None

    def test_computes_the_prompt_locally_only_without_any_prefill_worker_and_if_allowed(
        self, name: str
    ) -> None:
        policy = load_policy(name)

        assert policy.choose(request(), Snapshot(decode=views("d", 1))) == Placement(decode="d0")
        assert policy.choose(request(), Snapshot(decode=views("d", 1), is_local_allowed=False)) is None

    def test_needs_no_decode_worker_for_the_last_token(self, name: str) -> None:
        snapshot = Snapshot(prefill=views("p", 1), decode=views("d", 1, in_flight=4))

        assert load_policy(name).choose(request(max_tokens=1), snapshot) == Placement(
            decode=None, prefill="p0"
        )

    def test_chooses_only_workers_with_room(self, name: str) -> None:
        policy = load_policy(name)
        busy = view("d0", in_flight=1, free_blocks=1)
        small = view("d1", max_request_tokens=20)
        good = view("d2", in_flight=3, free_blocks=3)
        snapshot = Snapshot(prefill=views("p", 1), decode=(busy, small, good))
        prompt = request(tuple(range(40)))

        assert [policy.choose(prompt, snapshot) for _ in range(5)] == [
            Placement(decode="d2", prefill="p0")
        ] * 5

    def test_an_idle_worker_is_asked_though_its_last_heartbeat_showed_no_room(self, name: str) -> None:
        snapshot = Snapshot(colocated=(view("c0", free_blocks=0),))

        assert load_policy(name).choose(request(), snapshot) == Placement(decode="c0")

    def test_nobody_there_means_wait(self, name: str) -> None:
        assert load_policy(name).choose(request(), Snapshot()) is None
        assert load_policy(name).choose(request(), Snapshot(prefill=views("p", 2))) is None

    def test_equal_workers_get_equal_shares(self, name: str) -> None:
        policy = load_policy(name)
        snapshot = Snapshot(prefill=views("p", 2), decode=views("d", 3))

        placements = [policy.choose(request(), snapshot) for _ in range(60)]

        assert Counter(p.decode for p in placements if p) == {"d0": 20, "d1": 20, "d2": 20}
        assert Counter(p.prefill for p in placements if p) == {"p0": 30, "p1": 30}


def test_round_robin_goes_on_with_the_next_when_one_leaves() -> None:
    policy = RoundRobin()
    three, two = Snapshot(colocated=views("c", 3)), Snapshot(colocated=views("c", 3)[1:])

    order = [policy.choose(request(), snapshot) for snapshot in (three, three, two, two, three)]

    assert [p.decode for p in order if p] == ["c0", "c1", "c2", "c1", "c0"]


def test_least_loaded_prefers_few_tokens_over_few_requests() -> None:
    snapshot = Snapshot(
        colocated=(view("c0", in_flight=1, in_flight_tokens=200), view("c1", in_flight=3, in_flight_tokens=9))
    )

    assert LeastLoaded().choose(request(), snapshot) == Placement(decode="c1")


def test_least_loaded_sees_what_others_put_on_a_worker() -> None:
    snapshot = Snapshot(colocated=(view("c0", free_blocks=8), view("c1", in_flight_tokens=60)))

    assert LeastLoaded().choose(request(), snapshot) == Placement(decode="c1")


def test_a_trace_of_an_ended_request_does_not_break_a_tie() -> None:
    policy = LeastLoaded()
    snapshot = Snapshot(colocated=(view("c0", free_blocks=30), view("c1")))

    chosen = Counter(p.decode for _ in range(10) if (p := policy.choose(request(), snapshot)))

    assert chosen == {"c0": 5, "c1": 5}


def test_importing_the_router_loads_no_torch_ray_or_grpc() -> None:
    code = (
        "import sys, router.router, router.policies.least_loaded, router.policies.round_robin;"
        "print(sorted({'torch', 'ray', 'grpc', 'starlette'} & set(sys.modules)))"
    )

    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout == ("[]\n")
