"""Real processes are killed and frozen while they work: no wrong token, no silence, no block lost.

A fault counts only if its victim was in the phase that is to be hit; the test says so otherwise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.callers import Ask, Call, Caller
from tests.cluster.servers import free_port, serving
from tests.patience import until

LEASE_S = 3.0
LOST_AFTER_S = 2.0
WORKER_OPTIONS = ("--kv-memory", "64MiB", "--set", f"transfer.lease_s={LEASE_S}")
OPTIONS = (*WORKER_OPTIONS, "--set", f"router.lost_after_s={LOST_AFTER_S}")
# For a new request after a fault, the time to notice a frozen worker included: under 5 s on a quiet machine.
RECOVERY_S = 15.0
REPLACED_S = 60.0  # a Ray actor and a worker process start; how long that takes is not the point here

QUICK = Ask(prompt="after the fault", max_tokens=4)
LONG_PROMPTS = tuple(
    Ask(prompt=tuple((i * i + 7 * number) % 256 for i in range(2700)), max_tokens=20, is_new=True)
    for number in range(2)
)
LONG_ANSWERS = tuple(Ask(prompt=f"tell me story {number}", max_tokens=500) for number in range(2))


@contextmanager
def calling(model: Path, *options: str) -> Iterator[Caller]:
    """Run a server; yield a caller of it that knows the right answers."""
    with serving(model, *OPTIONS, *options) as server:
        caller = Caller(server.client)
        caller.learn([QUICK, *LONG_PROMPTS, *LONG_ANSWERS])
        yield caller


def one_in_the_middle_of_a_transfer(caller: Caller, role: str, calls: Sequence[Call]) -> str:
    """Wait until a worker of ``role`` computes a prompt and sends its KV, or receives it; return its id."""

    def find() -> str | None:
        for worker_id, books in caller.audit().items():
            if books["role"] == role and books.get("transfers"):
                return worker_id
        return None

    end_s = time.monotonic() + 10.0
    while (found := find()) is None:
        assert time.monotonic() < end_s, "no worker was ever in the middle of a transfer"
    return found


def one_in_mid_stream(caller: Caller, role: str, calls: Sequence[Call]) -> str:
    """Wait until every call streams; return the id of a worker of ``role`` that generates."""
    assert until(lambda: all(len(call.ids) > 5 for call in calls), within_s=10.0), "no call streams"
    running = {name: worker for name, worker in caller.workers().items() if worker["role"] == role}
    busy = [name for name, books in caller.audit().items() if name in running and books["sequences"]]
    assert busy and not any(call.is_over for call in calls), "the answers were over before the fault"
    return busy[0]


def strike(caller: Caller, victim: str, number: signal.Signals, calls: Sequence[Call]) -> Hit:
    """Hit one worker, and check what clients and the other workers see of it."""
    before = caller.workers()[victim]
    retries = caller.metric("twinpool_retries_total")
    os.kill(before["pid"], number)
    struck_s = time.monotonic()

    quick = caller.call(QUICK).join()
    assert caller.is_right(quick), quick.describe()
    assert quick.done_s - struck_s < RECOVERY_S
    for call in calls:
        caller.check(call.join())
    assert caller.metric("twinpool_retries_total") > retries, "the fault hit nobody"
    assert until(lambda: caller.is_clean(but=victim), within_s=LEASE_S + 2.0), caller.audit()
    return Hit(victim, before["pid"], before["generation"])


@dataclass(frozen=True, slots=True)
class Hit:
    """A worker that was hit, and which life of it."""

    worker_id: str
    pid: int
    generation: int

    def is_replaced(self, caller: Caller) -> bool:
        """Whether a later life of the worker is ready."""
        now = caller.workers().get(self.worker_id)
        return now is not None and now["generation"] > self.generation and now["state"] == "ready"

    def is_back(self, caller: Caller) -> bool:
        """Whether the same process is ready."""
        now = caller.workers().get(self.worker_id)
        return now is not None and now["pid"] == self.pid and now["state"] == "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Who is hit when, by what."""

    role: str
    asks: tuple[Ask, ...]
    find_victim: Callable[[Caller, str, Sequence[Call]], str]
    signal: signal.Signals

    def inflict(self, caller: Caller) -> Hit:
        """Hit a worker that is in the phase meant; one that was frozen is let go at the end."""
        calls = [caller.call(ask) for ask in self.asks]
        hit = strike(caller, self.find_victim(caller, self.role, calls), self.signal, calls)
        if self.signal is signal.SIGSTOP:
            os.kill(hit.pid, signal.SIGCONT)
        return hit

    def check_end(self, caller: Caller, hit: Hit) -> None:
        """Check that the victim, or who replaces it, works and holds nothing."""
        is_there = hit.is_back if self.signal is signal.SIGSTOP else hit.is_replaced
        assert until(lambda: is_there(caller), within_s=REPLACED_S), caller.workers()
        assert until(caller.is_clean, within_s=LEASE_S + 2.0), caller.audit()


FAULTS = {
    f"{role} {done} in mid {phase}": Fault(role=role, asks=asks, find_victim=find_victim, signal=number)
    for done, number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP))
    for role, phase, asks, find_victim in (
        ("prefill", "transfer", LONG_PROMPTS, one_in_the_middle_of_a_transfer),
        ("decode", "transfer", LONG_PROMPTS, one_in_the_middle_of_a_transfer),
        ("decode", "stream", LONG_ANSWERS, one_in_mid_stream),
    )
}


def inflict(caller: Caller, *names: str) -> None:
    """Inflict faults one after the other, wait until all victims work again, and ask everything anew."""
    hits = [(FAULTS[name], FAULTS[name].inflict(caller)) for name in names]
    for fault, hit in hits:
        fault.check_end(caller, hit)
    answered = [caller.call(ask) for ask in (QUICK, *LONG_PROMPTS, *LONG_ANSWERS)]
    assert all(caller.is_right(call.join()) for call in answered)
    assert until(caller.is_clean, within_s=RECOVERY_S), caller.audit()


def test_no_fault_of_a_worker_costs_a_token_or_a_block(slow_model: Path) -> None:
    with calling(slow_model, "--prefill", "2", "--decode", "2") as caller:
        inflict(caller, "prefill killed in mid transfer", "decode killed in mid stream")
        inflict(caller, "prefill frozen in mid transfer", "decode frozen in mid stream")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_five_faults_of_a_kind_cost_no_token_and_no_block(slow_model: Path, fault: str) -> None:
    with calling(slow_model, "--prefill", "2", "--decode", "2") as caller:
        for _ in range(5):
            inflict(caller, fault)


@contextmanager
def worker(model: Path, role: str, join: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker that nobody watches over."""
    command = [sys.executable, "-m", "twinpool", "worker", "--model", str(model), "--role", role]
    process = subprocess.Popen(
        [*command, "--worker-id", role, "--join", join, "--threads", "1", *WORKER_OPTIONS],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_workers_without_ray_are_lost_and_come_back_in_the_same_way(slow_model: Path) -> None:
    with ExitStack() as stack:
        port = free_port()
        for role in ("prefill", "decode"):
            stack.enter_context(worker(slow_model, role, f"127.0.0.1:{port}"))
        caller = stack.enter_context(calling(slow_model, "--without-ray", "--join-port", str(port)))
        calls = [caller.call(ask) for ask in LONG_PROMPTS]
        victim = one_in_the_middle_of_a_transfer(caller, "prefill", calls)

        hit = strike(caller, victim, signal.SIGKILL, calls)

        assert (
            "prefill" not in caller.workers() and caller.client.get("/admin/deployment")["ray"] == "not used"
        )
        stack.enter_context(worker(slow_model, "prefill", f"127.0.0.1:{port}"))
        assert until(lambda: hit.is_replaced(caller), within_s=REPLACED_S)
        assert all(caller.is_right(caller.call(ask).join()) for ask in (QUICK, *LONG_PROMPTS))
        assert caller.is_clean()
