"""Memory of large messages is not given back to the kernel and faulted in again for each of them."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys
from kv_transfer.heap import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for round in range(11):
    messages = [b"x" * (2 * 2**20 + i) for i in range(4)]
    del messages
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if round == 0:
        first = faults
print(faults - first)
"""


def faults(mode: str) -> int:
    """Return the page faults of ten rounds of four messages of 2 MiB, which are 512 pages each."""
    arguments = [sys.executable, "-c", COUNT_FAULTS, mode]
    return int(subprocess.run(arguments, capture_output=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="there is no mallopt")
def test_freed_memory_is_used_again_without_a_fault() -> None:
    assert faults("kept") < 10 * 4 * 512 / 20
    assert faults("as usual") > 10 * 4 * 512 / 2
