"""The program of a rank that is not rank 0; without its watcher it asks for the end of the whole worker."""

from __future__ import annotations

import os
import signal

from kv_transfer.nccl import preload
from twinpool.cluster.child_main import Report, Watch, run_child
from twinpool.cluster.config import RankSpec


def main() -> None:
    """Read the settings, run the rank, exit."""
    # Ctrl-C reaches all processes of a terminal; what it means is rank 0's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_child(RankSpec, _run, supervisor_pid=lambda spec: spec.worker.supervisor_pid)


def _run(spec: RankSpec, report: Report, watch: Watch) -> int:
    preload(os.environ)
    from twinpool.cluster.rank import run_rank

    return run_rank(spec, report=report, watch=watch)


if __name__ == "__main__":
    main()
