"""allow_many_files: a process may have as many files open as the system lets it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from twinpool.core.open_files import allow_many_files
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
allow_many_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most))
"""


def test_the_limit_is_the_one_of_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)

    assert done.stdout == "True\n"
