"""A `twinpool serve` of a test: started, watched, and looked after when it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from twinpool.cluster.api_client import ApiClient

PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    client: ApiClient
    folder: Path  # where it keeps its temporary files
    log: Path

    def descendants(self) -> list[psutil.Process]:
        """Every process that it started, directly or not."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def answer(self, prompt: str = "hello") -> list[int]:
        """Return the greedy token ids that answer ``prompt``."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        ids: list[int] = self.client.post("/v1/completions", body)["choices"][0]["token_ids"]
        return ids


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    """Run a server until the block ends; everything of it is killed then if it still lives."""
    with tempfile.TemporaryDirectory(prefix="tpt-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder, log = Path(name) / "t", Path(name) / "log"
        folder.mkdir()
        with log.open("w") as stderr:
            process = start(model, *options, folder=folder, stderr=stderr)
        started: list[psutil.Process] = []
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready http://127.0.0.1:"), log.read_text()
            server = Server(process, ApiClient(line.split()[1]), folder, log)
            started = server.descendants()
            yield server
        finally:
            process.kill()
            process.wait()
            for each in started:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            assert process.stdout is not None
            process.stdout.close()


def start(model: Path, *options: str, folder: Path, stderr: object) -> subprocess.Popen[str]:
    """Start `twinpool serve` on a free port with a small KV cache."""
    command = [sys.executable, "-m", "twinpool", "serve", "--model", str(model), "--port", "0"]
    return subprocess.Popen(
        [*command, "--kv-memory", "4MiB", "--threads", "1", *options],
        stdout=subprocess.PIPE,
        stderr=stderr,  # type: ignore[arg-type]
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
        start_new_session=True,
    )


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def all_gone(processes: list[psutil.Process]) -> bool:
    """Whether none of the processes lives; a zombie does not."""
    return not any(lives(process) for process in processes)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def terminate(server: Server) -> int:
    """Send SIGTERM and return the exit code."""
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(PATIENCE_S)
