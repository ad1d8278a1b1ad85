"""The program of a worker that somebody watches over; without its watcher it drains and ends."""

from __future__ import annotations

import os

from kv_transfer.nccl import preload
from twinpool.cluster.child_main import Report, Watch, run_child
from twinpool.cluster.config import WorkerConfig


def main() -> None:
    """Read the settings, run the worker, exit."""
    run_child(WorkerConfig, _run, supervisor_pid=lambda config: config.supervisor_pid)


def _run(config: WorkerConfig, report: Report, watch: Watch) -> int:
    preload(os.environ)
    from twinpool.cluster.worker import run_worker

    return run_worker(config, report=report, watch=watch)


if __name__ == "__main__":
    main()
