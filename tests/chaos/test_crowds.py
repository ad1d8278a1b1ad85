"""Crowds that come, vanish and are sent elsewhere: the workers end up as if nobody had been there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.chaos.callers import Ask, Call, Caller
from tests.cluster.servers import PATIENCE_S, Server, serving
from tests.patience import until

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
LEASE_S = 3.0
OPTIONS = ("--prefill", "2", "--decode", "2", "--kv-memory", "64MiB", "--set", f"transfer.lease_s={LEASE_S}")
SHORT = tuple(Ask(prompt=f"short question {number}", max_tokens=5) for number in range(8))
STORIES = tuple(Ask(prompt=f"a story of {number}", max_tokens=120) for number in range(20))
ENDLESS = tuple(
    Ask(prompt=tuple((i * number) % 256 for i in range(1200)), max_tokens=2000) for number in range(1, 61)
)
GAUGES = ("twinpool_in_flight_requests", "twinpool_queued_requests", "twinpool_worker_in_flight")
CROWD = """
import sys, time
from tests.chaos.callers import Ask, Call
calls = [Call(sys.argv[1], Ask(prompt=f"load {number}", max_tokens=2000)) for number in range(64)]
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(slow_model: Path) -> Iterator[Server]:
    with serving(slow_model, *OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def caller(server: Server) -> Caller:
    caller = Caller(server.client)
    caller.learn([*SHORT, *STORIES])
    return caller


@contextmanager
def asking(caller: Caller, *, every_s: float) -> Iterator[list[Call]]:
    """Ask short questions all the while; every answer is right in the end."""
    calls: list[Call] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(every_s):
            calls.append(caller.call(SHORT[len(calls) % len(SHORT)]))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield calls
    finally:
        is_over.set()
        thread.join()
    wrong = [call.describe() for call in calls if not caller.is_right(call.join())]
    assert calls and not wrong, f"{len(wrong)} of {len(calls)}: {wrong[:3]}"


def failures(caller: Caller, worker_id: str) -> tuple[int, str]:
    """Return how often a worker failed in a row, and how the last time."""
    wanted = {each["worker_id"]: each for each in caller.client.get("/admin/deployment")["workers"]}
    return wanted[worker_id]["num_failures"], wanted[worker_id]["last_failure"]


def test_room_comes_back_from_a_crowd_that_left_without_any_traffic(caller: Caller) -> None:
    calls = [caller.call(ask) for ask in ENDLESS]
    assert until(lambda: caller.metric("twinpool_queued_requests") > 0, within_s=20.0), "there was no crowd"
    for call in calls:
        with suppress(OSError):
            call.hang_up()

    time.sleep(LEASE_S + 2.0)

    assert caller.is_clean(), caller.audit()


def test_a_crowd_whose_process_is_killed_five_times_leaves_a_fast_server(caller: Caller) -> None:
    for _ in range(5):
        command = [sys.executable, "-c", CROWD, caller.client.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as crowd:
            assert crowd.stdout is not None and crowd.stdout.readline() == b"here\n"
            assert until(lambda: caller.metric("twinpool_in_flight_requests") > 20, within_s=20.0)
            crowd.kill()

    calls = [caller.call(SHORT[number % len(SHORT)]) for number in range(50)]
    assert all(caller.is_right(call.join()) for call in calls)
    assert until(caller.is_clean, within_s=LEASE_S + 2.0), caller.audit()
    assert {name: caller.metric(name) for name in GAUGES} == dict.fromkeys(GAUGES, 0.0)


def test_no_short_request_fails_while_prefill_workers_are_killed(caller: Caller) -> None:
    for number in range(2):
        victim = caller.workers()[f"prefill-{number}"]
        with asking(caller, every_s=0.05):
            time.sleep(0.5)
            os.kill(victim["pid"], signal.SIGKILL)
            assert until(lambda: has_successor(caller, victim), within_s=PATIENCE_S)  # noqa: B023
    assert until(caller.is_clean, within_s=LEASE_S + 2.0), caller.audit()


def test_no_token_is_lost_while_workers_are_asked_to_end(caller: Caller) -> None:
    for worker_id in ("decode-0", "prefill-1"):
        calls = [caller.call(ask) for ask in STORIES]
        assert until(lambda: all(call.ids for call in calls), within_s=30.0)  # noqa: B023
        victim, failed = caller.workers()[worker_id], failures(caller, worker_id)

        os.kill(victim["pid"], signal.SIGTERM)

        late = [caller.call(ask) for ask in SHORT]
        assert all(caller.is_right(call.join()) for call in (*calls, *late))
        assert until(lambda: not psutil.pid_exists(victim["pid"]), within_s=PATIENCE_S)  # noqa: B023
        assert until(lambda: has_successor(caller, victim), within_s=PATIENCE_S)  # noqa: B023
        assert failures(caller, worker_id) == failed, "to end when asked is no failure"
    assert until(caller.is_clean, within_s=LEASE_S + 2.0), caller.audit()


def test_requests_do_not_notice_that_the_control_store_of_ray_is_gone(server: Server, caller: Caller) -> None:
    before = caller.workers()
    (store,) = [process for process in server.descendants() if process.name() == "gcs_server"]

    with asking(caller, every_s=0.1):
        store.kill()
        time.sleep(20.0)

    def is_whole() -> bool:
        ready = {name for name, worker in caller.workers().items() if worker["state"] == "ready"}
        return ready == set(before) and caller.client.get("/admin/deployment")["ray"] == "ok"

    assert until(is_whole, within_s=PATIENCE_S), caller.client.get("/admin/deployment")
    assert until(lambda: num_worker_processes(server) == len(before), within_s=PATIENCE_S)
    assert until(caller.is_clean, within_s=LEASE_S + 2.0), caller.audit()


def test_a_server_that_is_asked_to_end_ends_its_answers_and_refuses_new_ones(
    server: Server, caller: Caller
) -> None:
    calls = [caller.call(ask) for ask in STORIES]
    assert until(lambda: all(call.ids for call in calls), within_s=30.0)

    server.process.send_signal(signal.SIGTERM)

    assert until(lambda: not caller.is_ready(), within_s=5.0)
    late = caller.call(SHORT[0]).join()
    assert late.status == 503 and late.retry_after is not None, late.describe()
    assert all(caller.is_right(call.join()) for call in calls)
    assert server.process.wait(PATIENCE_S) == 0


def has_successor(caller: Caller, worker: dict[str, object]) -> bool:
    now = caller.workers().get(str(worker["id"]))
    return now is not None and now["pid"] != worker["pid"] and now["state"] == "ready"


def num_worker_processes(server: Server) -> int:
    """Count the processes of workers, those that nobody knows included."""
    lines = []
    for process in server.descendants():
        with suppress(psutil.Error):
            lines.append(process.cmdline())
    return sum("twinpool.cluster.worker_process" in line for line in lines)
