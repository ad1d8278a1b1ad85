"""Real workers get other roles while real clients ask: the same answers, the same processes, clean books."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from router.roles import RoleChange, RoleOrder
from tests.chaos.callers import Ask, Call, Caller
from tests.checkpoints_toy import make_checkpoint
from tests.cluster.by_hand import TWINPOOL, ByHand, by_hand
from tests.patience import until
from tests.system import system
from tests.toys import request
from twinpool.core.clock import SystemClock
from twinpool.core.errors import InvalidRequest, Unavailable
from twinpool.core.ports import Role
from twinpool.core.timeline import RequestTimeline

ASKS = (
    Ask(prompt="tell me a story", max_tokens=300),
    Ask(prompt="tell me another", max_tokens=150),
    Ask(prompt="and a short one", max_tokens=20, is_stream=False),
    Ask(prompt=tuple((i * i + 5) % 256 for i in range(900)), max_tokens=30, is_new=True),
    Ask(prompt=tuple((3 * i) % 256 for i in range(300)), max_tokens=60),
)
NUM_CLIENTS = 4
ROLES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
WORKERS: dict[str, tuple[str, ...]] = {
    "prefill-0": (),
    "decode-0": (),
    "decode-1": ("--tensor-parallel", "2"),
}
CLEAN_S = 10.0


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHand]:
    """Three workers, one of them of two ranks; the right answers are known."""
    model = make_checkpoint(tmp_path_factory.mktemp("toy"), "llama")
    with by_hand(
        model,
        WORKERS,
        folder=tmp_path_factory.mktemp("logs"),
        options=("--kv-memory", "8MiB"),
        server_options=("--set", "router.max_attempts=2"),
    ) as there:
        there.caller.learn(ASKS)
        yield there


class Load:
    """Clients that ask one thing after the other until ``stop``."""

    def __init__(self, caller: Caller) -> None:
        self.calls: list[Call] = []
        self._caller = caller
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Call]:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        return self.calls

    def _ask(self, number: int) -> None:
        while not self._is_over.is_set():
            call = self._caller.call(ASKS[number % len(ASKS)])
            self.calls.append(call)
            call.join()
            number += 1


@contextmanager
def under_load(caller: Caller) -> Iterator[Load]:
    """Let clients ask until the block ends; every answer is right then, and nothing is left of any."""
    load = Load(caller)
    try:
        yield load
    finally:
        calls = load.stop()
    wrong = [call.describe() for call in calls if not caller.is_right(call)]
    assert wrong == [], f"{len(wrong)} of {len(calls)}"
    assert len(calls) > NUM_CLIENTS
    assert until(caller.is_clean, within_s=CLEAN_S), caller.audit()


def change(caller: Caller, worker_id: str, role: str, **order: object) -> dict[str, Any]:
    done: dict[str, Any] = caller.client.post(f"/admin/workers/{worker_id}/role", {"role": role, **order})
    return done


def roles(caller: Caller) -> dict[str, str]:
    return {worker_id: worker["role"] for worker_id, worker in caller.workers().items()}


def pids(deployment: ByHand) -> dict[str, list[int]]:
    return {name: [rank.pid for rank in worker.ranks()] for name, worker in deployment.workers.items()}


def twinpool(*args: str) -> str:
    done = subprocess.run([*TWINPOOL, *args], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def let_run(caller: Caller, load: Load) -> None:
    """Wait until some more answers are complete in the roles of this moment."""
    first = len(load.calls)
    assert until(lambda: len(load.calls) >= first + NUM_CLIENTS, within_s=30.0), "no answer ends"


def test_roles_go_round_under_load_and_no_answer_is_lost_or_other(deployment: ByHand) -> None:
    caller, before = deployment.caller, pids(deployment)
    moved = 0
    with under_load(caller) as load:
        for worker_id, role, order in (
            ("decode-1", "prefill", {}),  # 2 prefill, 1 decode
            ("prefill-0", "colocated", {"timeout_s": 0.05}),
            ("decode-1", "colocated", {}),
            ("decode-0", "colocated", {"timeout_s": 0.05}),  # 3 colocated
            ("decode-1", "prefill", {"clear_cache": True}),
            ("prefill-0", "decode", {"timeout_s": 0.05}),
            ("decode-0", "decode", {}),  # 1 prefill, 2 decode, and not those of before
            ("prefill-0", "prefill", {"timeout_s": 0.05, "clear_cache": True}),
            ("decode-1", "decode", {}),  # as at first
        ):
            done = change(caller, worker_id, role, **order)
            assert (done["worker"], done["role"]) == (worker_id, role)
            assert (done["freed_blocks"] is not None) is ("clear_cache" in order)
            assert roles(caller)[worker_id] == role
            moved += done["moved"]
            let_run(caller, load)

    assert roles(caller) == ROLES
    assert pids(deployment) == before
    assert moved > 0, "nothing ran for long enough to be moved"
    assert caller.metric("twinpool_retries_total") >= moved
    received = {name: set(worker["received_from"]) for name, worker in caller.workers().items()}
    assert received["decode-1"] >= {"prefill-0"}  # and the other way, over what was open already
    assert received["prefill-0"] >= {"decode-1"}
    assert received["decode-0"] >= {"prefill-0", "decode-1"}


def test_the_command_changes_a_role_and_refuses_what_nobody_should_want(deployment: ByHand) -> None:
    url = ("--url", deployment.caller.client.url)

    told = twinpool("role", "decode-1", "prefill", "--clear-cache", *url)
    assert told.startswith("decode-1, decode until now, is prefill after "), told
    refused = subprocess.run(
        [*TWINPOOL, "role", "decode-0", "prefill", *url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (refused.returncode, refused.stderr) == (
        1,
        "twinpool: error: worker: decode-0 as prefill would leave no decode worker\n",
    )
    assert twinpool("role", "decode-1", "decode", *url).startswith("decode-1, prefill until now, is decode")
    assert roles(deployment.caller) == ROLES


def test_two_changes_at_once_do_not_leave_nobody_to_decode(deployment: ByHand) -> None:
    caller = deployment.caller
    with under_load(caller), ThreadPoolExecutor() as threads:
        orders = [threads.submit(change, caller, name, "prefill") for name in ("decode-0", "decode-1")]
        errors = [order.exception() for order in orders]

        (refused,) = [error for error in errors if error is not None]
        assert isinstance(refused, InvalidRequest)
        assert str(refused).endswith("as prefill would leave no decode worker")
        (changed,) = [name for name, role in roles(caller).items() if role == "prefill" != ROLES[name]]
        change(caller, changed, "decode")
    assert roles(caller) == ROLES


def test_every_cache_is_cleared(deployment: ByHand) -> None:
    caller = deployment.caller
    for ask in ASKS:
        assert caller.is_right(caller.call(ask).join())
    assert until(caller.is_clean, within_s=CLEAN_S)
    cached = {name: books["blocks"]["cached"] for name, books in caller.audit().items()}
    assert cached["prefill-0"] > 0

    cleared = caller.client.post("/admin/cache/clear", {})

    freed = {worker["id"]: worker["freed_blocks"] for worker in cleared["workers"]}
    assert (cleared["ok"], freed) == (True, cached)
    assert {books["blocks"]["cached"] for books in caller.audit().values()} == {0}


def test_a_worker_that_is_killed_in_the_middle_of_its_change_loses_no_answer(deployment: ByHand) -> None:
    caller = deployment.caller
    victim = caller.workers()["decode-1"]["pid"]
    with ThreadPoolExecutor() as threads:
        calls, order = meet_long_answers(caller, threads)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(
            Unavailable,
            match=r"decode-1 was lost on the way to prefill: .*; its next life is decode as before",
        ):
            order.result()

    assert all(caller.is_right(call.join()) for call in calls), [call.describe() for call in calls]
    deployment.start_again("decode-1")
    assert roles(caller) == ROLES
    assert until(caller.is_clean, within_s=CLEAN_S), caller.audit()
    assert all(caller.is_right(caller.call(ask).join()) for ask in ASKS)


def test_a_worker_joins_a_new_router_in_the_role_that_it_was_given_last(deployment: ByHand) -> None:
    caller, before = deployment.caller, pids(deployment)
    change(caller, "decode-1", "prefill")

    deployment.restart_router()

    assert roles(caller) == {**ROLES, "decode-1": "prefill"}
    assert pids(deployment) == before
    with under_load(caller) as load:
        let_run(caller, load)
        change(caller, "decode-1", "decode")
        let_run(caller, load)
    assert roles(caller) == ROLES


def test_a_client_that_reads_nothing_keeps_no_worker_from_its_role(tmp_path: Path) -> None:
    """The engine goes on without it, so the worker empties; what was not read is computed again."""
    question = request(tuple(range(2, 40)), max_tokens=50, ignore_eos=True)

    async def run() -> None:
        limits = RouterConfig(role_settle_s=0.5, max_attempts=1)
        async with system(make_checkpoint(tmp_path, "llama"), prefill=1, decode=2, router=limits) as there:
            right = [output.token_id for output in await there.answer(question)]
            timeline = RequestTimeline("slow", SystemClock())
            async with aclosing(there.router.generate(question, timeline)) as outputs:
                tokens = [(await anext(outputs)).token_id for _ in range(3)]
                assert timeline.decode_worker is not None
                order = RoleOrder(worker_id=timeline.decode_worker, role=Role.PREFILL, timeout_s=0.2)
                done = await there.router.roles.change(order, on_changed=ignore)
                assert (done.role, done.num_moved) == (Role.PREFILL, 0)
                tokens += [output.token_id async for output in outputs]
            assert tokens == right and len(right) == 50
            assert [event.detail["reason"] for event in timeline.events if event.name == "retry"] == [
                "Reassigned"
            ]
            assert (await there.settled())["ok"]

    asyncio.run(run())


async def ignore(_: RoleChange) -> None:
    return


def meet_long_answers(
    caller: Caller, threads: ThreadPoolExecutor
) -> tuple[list[Call], Future[dict[str, Any]]]:
    """Let decode-1 begin to change its role while it generates; return all calls and the order."""
    calls: list[Call] = []
    for _ in range(20):
        asked = [caller.call(ASKS[0]) for _ in range(2)]
        calls += asked
        assert until(lambda asked=asked: all(call.ids for call in asked), within_s=30.0)  # type: ignore[misc]
        order = threads.submit(change, caller, "decode-1", "prefill", timeout_s=60.0)
        if until(is_changing(caller, "decode-1", order), within_s=5.0):
            return calls, order
        assert order.result()["role"] == "prefill"
        change(caller, "decode-1", "decode")
    raise AssertionError("no change ever met an answer")


def is_changing(caller: Caller, worker_id: str, order: Future[dict[str, Any]]) -> Callable[[], bool]:
    """Return whether a worker empties for its next role; it never does again once the order is over."""
    return lambda: not order.done() and caller.workers()[worker_id]["becomes"] is not None
