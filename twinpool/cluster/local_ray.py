"""Ray for one deployment on one machine: private, on loopback, behind a token, and in one folder.

Knows how Ray is started and what Ray's processes look like; who ends them is the agent's business.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from twinpool.core.errors import ConfigError

_PREFIX = "tp-"
_OWNER = "owner.lock"
# Ray appends /session_DATE_PID/sockets/plasma_store to its folder, and a Unix socket's path has 107 bytes.
_MAX_FOLDER_CHARS = 40
_OBJECT_STORE_BYTES = 80 * 2**20  # the least Ray takes; nothing of ours goes there
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's only way to stay on loopback on Linux
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_worker_niceness": "0",  # by default anything else on the machine goes before the model
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}
_SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,  # no idle processes: every worker is an actor
    # Requests do not need Ray, so nobody gives up because its control store is away or slow.
    "gcs_rpc_server_reconnect_timeout_s": 10**6,
    "health_check_timeout_ms": 60_000,
    "worker_register_timeout_seconds": 300,
    "agent_register_timeout_ms": 300_000,
    # A worker ends with its actor by its own rule, which spares it when only Ray itself died.
    "kill_child_processes_on_worker_exit": False,
    "memory_monitor_refresh_ms": 0,  # workers are not Ray's to kill
}
_DAEMONS = frozenset({"gcs_server", "raylet"})
_TRY_AGAIN_AFTER_S = 2.0
_KILL_LIMIT_S = 10.0  # a process that the kernel does not let go is left to it
_PR_SET_CHILD_SUBREAPER = 36


def start_local_ray(
    folder: Path, *, num_cpus: int, timeout_s: float, progress: Callable[[str], None]
) -> None:
    """Start Ray in this process's name, again if the machine was too busy for Ray's own time limits.

    The process has had ``local_ray_environment`` since its start: Ray reads some of it only once.

    Args:
        folder: Where Ray writes; a short path.
        num_cpus: What Ray may hand out to workers; a number of slots, not of cores.
        timeout_s: For all tries together.
        progress: Told of each failed try.

    Raises:
        ConfigError: Ray does not start.
    """
    import ray

    end_s = time.monotonic() + timeout_s
    while True:
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder),
                _system_config=_SYSTEM_CONFIG,
            )
            return
        except Exception as error:  # Ray raises bare exceptions for all that can go wrong here
            with contextlib.suppress(Exception):
                ray.shutdown()
            kill_descendants()
            if time.monotonic() + _TRY_AGAIN_AFTER_S > end_s:
                raise ConfigError("--ray-address", f"Ray cannot be started here: {error}") from error
            progress(f"Ray did not start ({first_line(error)}), trying again")
            time.sleep(_TRY_AGAIN_AFTER_S)


def local_ray_environment() -> dict[str, str]:
    """Return what a process that starts Ray needs in its environment, with a new secret token."""
    return {**_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class OwnedFolder:
    """A folder that is ours as long as this process lives: whoever can lock its file may remove it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls) -> OwnedFolder:
        """Make an empty one with a short path."""
        parent = _parent_folder()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(path / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(path, lock)

    def remove(self) -> None:
        """Remove it with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned_folders() -> None:
    """Remove the folders of deployments that were killed together with their agent."""
    for lock_file in _parent_folder().glob(f"{_PREFIX}*/{_OWNER}"):
        try:
            lock = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent, ignore_errors=True)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies; does nothing where there is no such thing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(*, but: int) -> None:
    """Take note of adopted processes that have died; ``but`` is the child that somebody else waits for."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid != but and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def kill_descendants(*, only: Callable[[psutil.Process], bool] = lambda process: True) -> None:
    """Kill every process that descends from this one, new ones too, until there is none."""
    end_s = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < end_s:
        living = [process for process in psutil.Process().children(recursive=True) if only(process)]
        if not living:
            return
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(living, timeout=0.5)


def is_of_ray(process: psutil.Process) -> bool:
    """Whether a process is one of Ray's own: a daemon, or one that runs actors."""
    try:
        line = process.cmdline()
    except psutil.Error:
        return False
    return bool(line) and (line[0].startswith("ray::") or any("/ray/" in part for part in line[:4]))


def has_daemons() -> bool:
    """Whether Ray's two daemons live among the descendants of this process."""
    names = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.add(process.name())
    return names >= _DAEMONS


def first_line(error: BaseException) -> str:
    """Return what an error of Ray says before its many lines of traces."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _parent_folder() -> Path:
    folder = Path(tempfile.gettempdir())
    return folder if len(str(folder)) + len(_PREFIX) + 8 <= _MAX_FOLDER_CHARS else Path("/tmp")
