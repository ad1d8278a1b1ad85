"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """Return the most that was ever resident at once: own, shared, and of files."""
    return _kib("VmHWM") * 1024


def shared_bytes() -> int:
    """Return what is resident of memory that processes share without a file."""
    return _kib("RssShmem") * 1024


def _kib(name: str) -> int:
    """Read one line of proc_pid_status(5)."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")
