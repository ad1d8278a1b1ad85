"""The Ray driver of one deployment: starts or finds Ray, starts the controller, and keeps it informed.

    agent                                 this process                  Ray
      stdin:  DriverSpec, one JSON line ->   starts or finds Ray    ->   controller, worker actors
      stdin:  {"op": ...} lines         ->   sync, twice a second   ->
      <- stdout: {"event": ...} lines        <- how the workers are
      stdin closes                      ->   ends everything

Ray ends its drivers without a word when it loses its own daemons; that is why nothing but this lives here.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from twinpool.cluster.config import DeploymentSpec
from twinpool.cluster.local_ray import first_line, start_local_ray
from twinpool.cluster.pools import WorkerReport
from twinpool.cluster.roster import Roster, Wanted
from twinpool.core.config import bind, unbind
from twinpool.core.errors import ConfigError, ServingError

_SYNC_EVERY_S = 0.5
_FIRST_ORDERS_S = 0.1  # for those that were there before us, so that no worker is started and ended again
_SYNC_TIMEOUT_S = 5.0
FAILED = 3  # exit code after an event has told why; any other but 0 is a crash
_FINISH_MARGIN_S = 15.0  # for the ends of processes beyond the time to drain
_SLOTS = 1024  # of a Ray of our own: more workers than a machine holds; the cores are shared anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSpec:
    """What a driver is told at its start."""

    deployment: DeploymentSpec
    folder: Path  # of a Ray that is started here


def main() -> None:
    """Run until the agent says ``stop`` or closes stdin."""
    events = _take_stdout()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = bind(DriverSpec, json.loads(sys.stdin.readline()))
    sys.exit(_Driver(spec.deployment, spec.folder, events, _follow_stdin()).run())


class _Driver:
    def __init__(
        self,
        spec: DeploymentSpec,
        folder: Path,
        events: _Events,
        ops: queue.SimpleQueue[Mapping[str, Any]],
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._events = events
        self._ops = ops
        self._wanted = Roster(spec.config.pools.workers()).members
        self._drain_s: float | None = None  # set once the end has come; None: at once

    def run(self) -> int:
        try:
            self._start_ray()
            self._finish(self._follow(self._make_controller()))
        except ServingError as error:
            self._events.put("failed", text=str(error))
            return FAILED
        except _Gone:
            return 0
        return 0

    def _start_ray(self) -> None:
        if self._spec.is_local:
            self._events.put("progress", text="starting Ray on this machine")
            # In this thread, since Ray's daemons die with the thread that started them.
            self._start_local()
            return
        self._events.put("progress", text=f"connecting to Ray at {self._spec.config.ray_address}")
        self._connect()

    def _start_local(self) -> None:
        start_local_ray(
            self._folder,
            num_cpus=_SLOTS,
            timeout_s=self._spec.config.timeouts.ray_start_s,
            progress=lambda text: self._events.put("progress", text=text),
        )

    def _connect(self) -> None:
        import ray

        address = self._spec.config.ray_address
        try:
            ray.init(address=address, log_to_driver=False, logging_level=40)
        except Exception as error:  # Ray raises bare exceptions for all that can go wrong here
            raise ConfigError("--ray-address", f"{address} does not answer: {first_line(error)}") from error

    def _make_controller(self) -> Any:
        import ray

        from twinpool.cluster.controller import NAMESPACE, Controller

        actor_class: Any = ray.remote(Controller)
        return actor_class.options(
            name=self._spec.name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=100,
        ).remote(self._spec)

    def _follow(self, controller: Any) -> Any:
        """Keep controller and server informed until the server wants the end; return the controller."""
        import ray

        told: Sequence[WorkerReport] | None = None
        is_away = False
        self._hear(controller, timeout_s=_FIRST_ORDERS_S)
        while self._drain_s is None:
            try:
                reports = ray.get(controller.sync.remote(self._wanted), timeout=_SYNC_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                if not is_away:
                    self._events.put("away", text=first_line(error))
                is_away = True
                if isinstance(error, ray.exceptions.ActorDiedError):
                    # This process had no time for so long that the controller held its owner for gone.
                    controller = self._make_controller()
            else:
                if is_away or reports != told:
                    self._events.put("workers", workers=[unbind(report) for report in reports])
                is_away, told = False, reports
            self._hear(controller, timeout_s=_SYNC_EVERY_S)
        return controller

    def _hear(self, controller: Any, *, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while self._drain_s is None and (left_s := end_s - time.monotonic()) > 0:
            try:
                op = self._ops.get(timeout=left_s)
            except queue.Empty:
                return
            if op["op"] == "gone":
                raise _Gone
            if op["op"] == "stop":
                self._drain_s = float(op["drain_s"])
            elif op["op"] == "want":
                self._wanted = bind(Wanted, {"workers": op["workers"]}).workers
            elif op["op"] == "replace":
                controller.replace.remote(str(op["worker_id"]))

    def _finish(self, controller: Any) -> None:
        """Drain the workers, then end the controller; the agent ends a Ray of our own."""
        import ray

        assert self._drain_s is not None
        limit_s = self._drain_s + _FINISH_MARGIN_S
        if self._drain_s > 0 or not self._spec.is_local:
            with contextlib.suppress(ray.exceptions.RayError):
                finishing = controller.finish.remote()
                self._while_listening(lambda: ray.get(finishing, timeout=limit_s))
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(controller, no_restart=True)
        ray.shutdown()

    def _while_listening(self, work: Callable[[], object]) -> None:
        """Run ``work`` in a thread; a server that goes, or asks again to stop, ends the wait.

        Raises:
            ServingError: What ``work`` raised.
        """
        result: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                work()
                result.put(None)
            except BaseException as error:  # noqa: BLE001 - handed to the waiting thread as it is
                result.put(error)

        threading.Thread(target=run, daemon=True, name="finishing").start()
        while True:
            with contextlib.suppress(queue.Empty):
                error = result.get(timeout=0.05)
                if error is not None:
                    raise error
                return
            with contextlib.suppress(queue.Empty):
                if self._ops.get_nowait()["op"] in ("gone", "stop"):
                    raise _Gone


class _Gone(Exception):
    """The server is gone or in a hurry: end everything at once."""


class _Events:
    """Lines to the server; a server that does not listen any more is noticed elsewhere."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def put(self, event: str, **fields: object) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._stream.write(json.dumps({"event": event, **fields}) + "\n")
            self._stream.flush()


def _take_stdout() -> _Events:
    """Keep stdout for events alone: what libraries print goes to stderr."""
    own = os.dup(1)
    os.set_inheritable(own, False)
    os.dup2(2, 1)
    return _Events(os.fdopen(own, "w", encoding="utf-8"))


def _follow_stdin() -> queue.SimpleQueue[Mapping[str, Any]]:
    ops: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()

    def follow() -> None:
        for line in sys.stdin:
            ops.put(json.loads(line))
        ops.put({"op": "gone"})

    threading.Thread(target=follow, daemon=True, name="stdin").start()
    return ops


if __name__ == "__main__":
    main()
