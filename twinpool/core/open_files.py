"""How many files a process may have open."""

from __future__ import annotations

import contextlib
import sys


def allow_many_files() -> None:
    """Raise the limit to what the system lets this process have.

    Each connection is an open file, those of strangers too, and some libraries end the process when it may
    have no more.  Does nothing where there is no such limit.
    """
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system that says more than it allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
