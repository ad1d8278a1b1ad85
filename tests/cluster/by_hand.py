"""A router and workers that a test starts one by one, without Ray, each a process with a log of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.callers import Caller
from tests.cluster.servers import PATIENCE_S, free_port
from tests.patience import until
from twinpool.cluster.api_client import ApiClient

TWINPOOL = (sys.executable, "-m", "twinpool")


@dataclass(frozen=True, slots=True)
class HandWorker:
    """One worker: its process is rank 0, its children are the other ranks."""

    process: subprocess.Popen[str]
    log: Path

    def ranks(self) -> list[psutil.Process]:
        """Every rank, rank 0 first."""
        own = psutil.Process(self.process.pid)
        others = [child for child in own.children() if "twinpool.cluster.rank_process" in child.cmdline()]
        return [own, *sorted(others, key=lambda child: child.cmdline()[-1])]


class ByHand:
    """A running deployment.

    Args:
        caller: Of its router.
        start: Starts a worker by its id.
        restart_router: Kills the router and starts it anew, at the same addresses.
        workers: Those that were started, by id.
    """

    def __init__(
        self,
        caller: Caller,
        start: Callable[[str], HandWorker],
        restart_router: Callable[[], None],
        workers: dict[str, HandWorker],
    ) -> None:
        self.caller = caller
        self.workers = workers
        self._start = start
        self._restart_router = restart_router

    def start_again(self, worker_id: str) -> None:
        """Start a worker that has ended, and wait until it is there."""
        self.workers[worker_id] = self._start(worker_id)
        self.wait_for_all()

    def restart_router(self) -> None:
        """Kill the router, start it again, and wait until every worker has joined it."""
        self._restart_router()
        self.wait_for_all()

    def wait_for_all(self) -> None:
        def are_there() -> bool:
            there = self.caller.workers()
            return all(there.get(name, {}).get("state") == "ready" for name in self.workers)

        assert until(are_there, within_s=PATIENCE_S), self.caller.workers()


@contextmanager
def by_hand(
    model: Path,
    workers: Mapping[str, Sequence[str]],
    *,
    folder: Path,
    options: Sequence[str] = (),
    server_options: Sequence[str] = (),
) -> Iterator[ByHand]:
    """Run a router and workers until the block ends; all are there when it begins.

    Args:
        model: A folder.
        workers: The options of each, by its id; the id begins with the role.
        folder: Where the logs go.
        options: Of the router and of every worker.
        server_options: Of the router.
    """
    join, http = free_port(), free_port()
    with ExitStack() as stack:

        def run(name: str, *args: str) -> subprocess.Popen[str]:
            log = stack.enter_context((folder / name).open("w"))
            process = subprocess.Popen(
                [*TWINPOOL, *args, "--model", str(model), *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.callback(_kill, process)
            return process

        def start(worker_id: str) -> HandWorker:
            who = ("--role", worker_id.partition("-")[0], "--worker-id", worker_id)
            where = ("--join", f"127.0.0.1:{join}", "--threads", "1")
            return HandWorker(run(worker_id, "worker", *who, *where, *workers[worker_id]), folder / worker_id)

        def start_router() -> subprocess.Popen[str]:
            ports = ("--join-port", str(join), "--port", str(http))
            return run("router", "serve", "--without-ray", *ports, *server_options)

        def wait_for_router() -> None:
            assert routers[-1].stdout is not None
            line = routers[-1].stdout.readline()
            assert line == f"ready http://127.0.0.1:{http}\n", (folder / "router").read_text()

        def restart_router() -> None:
            _kill(routers[-1])
            routers.append(start_router())
            wait_for_router()

        routers = [start_router()]
        started = {worker_id: start(worker_id) for worker_id in workers}
        wait_for_router()
        caller = Caller(ApiClient(f"http://127.0.0.1:{http}"))
        deployment = ByHand(caller, start, restart_router, started)
        deployment.wait_for_all()
        yield deployment


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process that still runs, and its children; one of them may be frozen."""
    children: list[psutil.Process] = []
    if process.stdout is not None and process.stdout.closed:  # it was killed before
        return
    if process.poll() is None:
        children = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
