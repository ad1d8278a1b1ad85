"""ChildProcess: what a child says is heard, and its end has a reason."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from twinpool.cluster.child import ChildProcess, child_environment, threads_of
from twinpool.cluster.config import WorkerConfig
from twinpool.cluster.pools import LifeState, Phase
from twinpool.core.ports import Role

CONFIG = WorkerConfig(worker_id="decode-0", role=Role.DECODE, generation=3, join="127.0.0.1:1")
SAY = """
import json, sys
def say(event, text=""):
    print(json.dumps({"event": event, "text": text}), flush=True)
"""
Act = Callable[[ChildProcess, LifeState], Awaitable[None]]


def child(*command: str) -> ChildProcess:
    return ChildProcess("decode-0", CONFIG, command=command, threads=1)


def follow(program: str, act: Act | None = None) -> list[LifeState]:
    """Run a child and return every state it was in; ``act`` is called with each."""

    async def run() -> list[LifeState]:
        worker = child(sys.executable, "-c", SAY + program)
        running = asyncio.create_task(worker.run())
        states: list[LifeState] = []
        async with asyncio.timeout(30):
            while not states or states[-1].phase is not Phase.ENDED:
                states.append(await worker.next_state(states[-1] if states else None))
                if act is not None:
                    await act(worker, states[-1])
            await running
        return states

    return asyncio.run(run())


def test_the_child_gets_its_settings() -> None:
    states = follow(
        "settings = json.loads(sys.stdin.readline())\n"
        "say('failed', f\"{settings['worker_id']} of generation {settings['generation']}\")\n"
    )

    assert states[-1].detail == "decode-0 of generation 3"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("say('failed', 'no such model'); sys.exit(2)", "no such model"),
        ("print('a'); print('boom: x', file=sys.stderr); sys.exit(7)", "exit 7: boom: x"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "killed by SIGKILL, by hand or because",
        ),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("print('nothing to do')", "exit 0: nothing to do"),
        ("print('{not json'); print('[]'); sys.exit(1)", "exit 1"),
        ("sys.stderr.write('x' * 200_000 + chr(10)); sys.exit(1)", "exit 1"),
    ],
)
def test_the_reason_of_its_end_is_its_own(program: str, reason: str) -> None:
    state = follow(program)[-1]

    assert state.phase is Phase.ENDED
    assert state.detail.startswith(reason)
    assert not state.is_drained


def test_a_log_that_cannot_be_written_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(sys, "stderr", Full())

    state = follow("print('boom', file=sys.stderr, flush=True); say('joined'); sys.exit(7)")[-1]

    assert (state.phase, state.detail) == (Phase.ENDED, "exit 7: boom")


def test_a_program_that_does_not_exist_is_an_end_with_a_reason() -> None:
    async def run() -> LifeState:
        return await child("/no/such/program").run()

    assert "cannot be started" in asyncio.run(run()).detail


def test_stopping_lets_it_drain() -> None:
    tasks = []

    async def stop_once_joined(worker: ChildProcess, state: LifeState) -> None:
        if state.phase is Phase.RUNNING:
            tasks.append(asyncio.create_task(worker.stop(drain_s=20.0)))

    states = follow(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "say('joined')\n"
        "time.sleep(60)\n",
        stop_once_joined,
    )

    assert states[-1].detail == "drained"
    assert states[-1].is_drained


def test_one_that_does_not_drain_is_ended_by_force_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.cluster.child._KILL_AFTER_S", 0.25)
    tasks = []

    async def stop_once_joined(worker: ChildProcess, state: LifeState) -> None:
        if state.phase is Phase.RUNNING and not tasks:
            tasks.append(asyncio.create_task(worker.stop(drain_s=0.25)))

    states = follow(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('joined')\ntime.sleep(60)\n",
        stop_once_joined,
    )

    assert states[-1].detail == "ended by force: not drained in 0.5 s"
    assert not states[-1].is_drained


def test_one_that_is_stopped_before_it_runs_ends_too() -> None:
    async def run() -> LifeState:
        worker = child(sys.executable, "-c", "import time; time.sleep(60)")
        stopping = asyncio.create_task(worker.stop(drain_s=20.0))
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await worker.run()
            await stopping
        return await worker.next_state(None)

    assert asyncio.run(run()).detail == "killed by SIGTERM"


def test_the_pid_is_the_childs_own() -> None:
    async def kill(_: ChildProcess, state: LifeState) -> None:
        if state.phase is Phase.RUNNING:
            assert state.pid is not None
            os.kill(state.pid, signal.SIGKILL)

    states = follow("say('joined')\nimport time\ntime.sleep(60)\n", kill)

    assert states[-1].detail.startswith("killed by SIGKILL")


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "TWINPOOL_API_KEY"])
def test_a_worker_learns_no_secret_that_it_does_not_need(name: str) -> None:
    environment = child_environment({name: "geheim", "PATH": "/bin"}, threads=3)

    assert "geheim" not in environment.values()
    assert (environment["PATH"], environment["OMP_NUM_THREADS"]) == ("/bin", "3")


def test_workers_share_the_cores_unless_told_otherwise() -> None:
    cores = len(os.sched_getaffinity(0))

    assert threads_of(CONFIG) == cores
    assert threads_of(replace(CONFIG, num_neighbours=cores - 1)) == 1
    assert threads_of(replace(CONFIG, num_neighbours=100)) == 1
    assert threads_of(replace(CONFIG, tensor_parallel=cores)) == 1
    assert threads_of(replace(CONFIG, threads=3, num_neighbours=100)) == 3
