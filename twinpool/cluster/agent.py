"""The process between a server and Ray: it owns every process and file of a deployment, and ends them all.

    server --- stdin: settings, then {"op": ...} lines ---> agent ---> Ray driver ---> Ray ---> workers
           <-- stdout: {"event": ...} lines ----------------

Whatever the driver starts descends from the agent, which adopts orphans, so the end is certain: when the
server says ``stop`` or is gone, the driver may drain the workers, then all that is left is killed and the one
folder Ray wrote to is removed.  If Ray dies instead, the workers live on without it; the agent starts Ray
again, and each new worker takes the place of its earlier life when it joins the router.

The agent is in a session of its own: neither Ctrl-C nor the server's death keeps it from cleaning up.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from twinpool.cluster.config import DeploymentSpec
from twinpool.cluster.local_ray import (
    OwnedFolder,
    adopt_orphans,
    has_daemons,
    is_of_ray,
    kill_descendants,
    local_ray_environment,
    reap_orphans,
    remove_abandoned_folders,
)
from twinpool.cluster.ray_driver import FAILED, DriverSpec
from twinpool.core.config import bind, unbind

_RESTART_AFTER_S = 1.0
_MAX_RESTART_S = 30.0
_MAX_FIRST_TRIES = 3  # a driver that crashes before there was any worker is started so often
_CHECK_EVERY_S = 1.0
_GONE_LIMIT_S = 6.0  # for the driver's own clean-up once the server is gone


def main() -> None:
    """Run until the server says ``stop`` or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    remove_abandoned_folders()
    spec = bind(DeploymentSpec, json.loads(sys.stdin.readline()))
    try:
        code = _Agent(spec).run()
    finally:
        kill_descendants()
    sys.exit(code)


class _Agent:
    def __init__(self, spec: DeploymentSpec) -> None:
        self._spec = spec
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # from the server; None: it is gone
        self._wanted: str | None = (
            None  # the latest order of that kind; a restarted driver must hear it again
        )
        self._has_workers = False  # a driver has told of workers, ever
        self._is_up = False  # the present driver has
        self._is_ending = False

    def run(self) -> int:
        threading.Thread(target=self._follow_server, daemon=True, name="server").start()
        num_crashes, pause_s = 0, _RESTART_AFTER_S
        while not self._is_ending:
            folder = OwnedFolder.make()
            try:
                code = self._run_driver(folder)
            finally:
                # Ray's processes only: workers that lost Ray go on.
                kill_descendants(only=is_of_ray)
                folder.remove()
            if code == 0 or self._is_ending:
                break
            if code == FAILED:
                return 1
            num_crashes += 1
            if not self._has_workers and num_crashes >= _MAX_FIRST_TRIES:
                self._tell("failed", text=f"Ray ended {num_crashes} times while it started (exit {code})")
                return 1
            self._tell("away", text="Ray is gone; starting it again")
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MAX_RESTART_S)
        kill_descendants()
        self._tell("stopped")
        return 0

    def _run_driver(self, folder: OwnedFolder) -> int:
        spec = DriverSpec(deployment=self._spec, folder=folder.path)
        self._is_up = False
        driver = subprocess.Popen(
            [sys.executable, "-m", "twinpool.cluster.ray_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | (local_ray_environment() if self._spec.is_local else {}),
        )
        assert driver.stdin is not None and driver.stdout is not None
        relay = threading.Thread(target=self._relay, args=(driver.stdout,), daemon=True, name="events")
        relay.start()
        _write(driver.stdin, json.dumps(unbind(spec)) + "\n")
        if self._wanted is not None:
            _write(driver.stdin, self._wanted)
        self._serve(driver, driver.stdin)
        relay.join(timeout=1.0)
        return driver.returncode

    def _pause(self, pause_s: float) -> None:
        """Wait, unless the server wants the end; the workers that it names are for the next driver."""
        end_s = time.monotonic() + pause_s
        while not self._is_ending and (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._note(self._lines.get(timeout=left_s))

    def _note(self, line: str | None) -> None:
        op = "stop" if line is None else json.loads(line)["op"]
        self._is_ending = self._is_ending or op == "stop"
        if line is not None and op == "want":
            self._wanted = line

    def _serve(self, driver: subprocess.Popen[str], stdin: IO[str]) -> None:
        """Pass ops on until the driver has ended; one that outlives the server or Ray for long is killed."""
        gone_s: float | None = None
        checked_s = time.monotonic()
        while driver.poll() is None:
            try:
                line = self._lines.get(timeout=0.1)
            except queue.Empty:
                if gone_s is not None and time.monotonic() - gone_s > _GONE_LIMIT_S:
                    driver.kill()
                if time.monotonic() - checked_s > _CHECK_EVERY_S and not self._is_ending:
                    checked_s = time.monotonic()
                    reap_orphans(but=driver.pid)
                    if self._spec.is_local and self._is_up and not has_daemons():
                        # Ray's own clients would wait for a daemon that nobody starts again.
                        driver.kill()
                continue
            self._note(line)
            if self._is_ending and not self._is_up:
                driver.kill()
            if line is None:
                gone_s = time.monotonic()
                stdin.close()
            else:
                _write(stdin, line)

    def _follow_server(self) -> None:
        for line in sys.stdin:
            self._lines.put(line)
        self._lines.put(None)

    def _relay(self, events: IO[str]) -> None:
        for line in events:
            if '"event": "workers"' in line:
                self._has_workers = self._is_up = True
            _write(sys.stdout, line)

    def _tell(self, event: str, **fields: Any) -> None:
        _write(sys.stdout, json.dumps({"event": event, **fields}) + "\n")


def _write(stream: IO[str], line: str) -> None:
    """Write a line; a reader that is gone is noticed elsewhere."""
    try:
        stream.write(line)
        stream.flush()
    except (OSError, ValueError):
        if stream is sys.stdout:
            # Python would complain about it once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
