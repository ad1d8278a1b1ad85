"""A system that ran and ended was never there: no process, port, socket, shared memory or file is left."""

from __future__ import annotations

import contextlib
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.chaos.callers import Ask, Caller
from tests.checkpoints_toy import make_checkpoint
from tests.cluster.servers import Server, lives, serving, start, terminate
from tests.patience import until
from twinpool.cluster.api_client import ApiClient

KILLED_S = 10.0  # a deployment whose server was killed is gone by itself in that time
MEMORY = Path("/dev/shm")
ASK = Ask(prompt="who was here?", max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy"), "llama")


@dataclass(frozen=True, slots=True)
class Belongings:
    """What the processes of a deployment have of the machine."""

    processes: tuple[psutil.Process, ...]
    ports: frozenset[int]
    files: frozenset[Path]  # shared memory, sockets and other files, which they have open or mapped

    @classmethod
    def of(cls, root: psutil.Process, *, folder: Path) -> Belongings:
        """Look at a process and all that descend from it; ``folder`` is where they keep temporary files."""
        processes = (root, *root.children(recursive=True))
        return cls(
            processes,
            frozenset(port for process in processes for port in ports(process)),
            frozenset(
                file
                for process in processes
                for file in files(process)
                if folder in file.parents or MEMORY in file.parents
            ),
        )

    def left(self, folder: Path) -> list[str]:
        """Name everything that is still there, and what else ``folder`` has."""
        return self.living() + [str(file) for file in {*self.files, *folder.iterdir()} if file.exists()]

    def living(self) -> list[str]:
        """Name the processes that live, and the ports that cannot be taken."""
        living = [f"process {process}" for process in self.processes if lives(process)]
        return living + [f"port {port}" for port in self.ports if not can_listen(port)]


def ports(process: psutil.Process) -> Iterator[int]:
    for connection in process.net_connections(kind="inet"):
        if connection.status == psutil.CONN_LISTEN:
            yield connection.laddr.port


def files(process: psutil.Process) -> Iterator[Path]:
    paths = [file.path for file in process.open_files()]
    paths += [mapped.path for mapped in process.memory_maps()]
    paths += [str(connection.laddr) for connection in process.net_connections(kind="unix")]
    for path in paths:
        if path.startswith("/"):
            yield Path(path)


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


def come_and_go(model: Path, go: Callable[[Server], None], *, within_s: float) -> None:
    with serving(model, "--prefill", "1", "--decode", "1") as server:
        caller = Caller(server.client)
        caller.learn([ASK])
        had = Belongings.of(psutil.Process(server.process.pid), folder=server.folder)
        assert len(had.processes) > 5 and len(had.ports) > 5
        assert any(server.folder in file.parents for file in had.files)

        go(server)

        until(lambda: not had.left(server.folder), within_s=within_s, every_s=0.2)
        assert had.left(server.folder) == []


def stop(server: Server) -> None:
    assert terminate(server) == 0


def kill(server: Server) -> None:
    server.process.kill()
    server.process.wait()


def test_one_that_was_asked_to_end_leaves_nothing(model: Path) -> None:
    come_and_go(model, stop, within_s=1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_that_were_asked_to_end_leave_nothing(model: Path) -> None:
    for _ in range(10):
        come_and_go(model, stop, within_s=1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_whose_server_was_killed_leave_nothing(model: Path) -> None:
    for _ in range(10):
        come_and_go(model, kill, within_s=KILLED_S)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_of_which_every_process_was_killed_leave_what_one_leaves(model: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tpt-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        left = []
        for _ in range(20):
            process = start(model, "--colocated", "1", folder=folder, stderr=None)
            assert process.stdout is not None
            with process.stdout:
                url = process.stdout.readline().split()[1]
                Caller(ApiClient(url)).learn([ASK])
                had = Belongings.of(psutil.Process(process.pid), folder=folder)
                for each in had.processes:
                    each.suspend()
                for each in had.processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.send_signal(signal.SIGKILL)
                process.wait()
            assert until(lambda: not had.living(), within_s=KILLED_S), had.living()  # noqa: B023
            assert not [file for file in had.files if MEMORY in file.parents and file.exists()]
            left.append(len(list(folder.iterdir())))
        assert left == [1] * 20
