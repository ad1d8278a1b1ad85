"""Runs a benchmark before everything else on a busy machine.

    python -m benchmarks.alone benchmarks.overlap [its options]

It gets a session of its own with the most weight that the scheduler gives (root; Linux): otherwise two
processes that wait for a core to hand over are all that is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PRIORITY = -15


def main() -> int:
    """Run the module that the arguments name, and return its exit code."""
    running = subprocess.Popen([sys.executable, "-m", *sys.argv[1:]], start_new_session=True)
    try:
        os.setpriority(os.PRIO_PROCESS, running.pid, _PRIORITY)
        autogroup = Path(f"/proc/{running.pid}/autogroup")
        if autogroup.exists():
            autogroup.write_text(str(_PRIORITY))
        return running.wait()
    except KeyboardInterrupt:
        running.terminate()
        return running.wait()


if __name__ == "__main__":
    sys.exit(main())
