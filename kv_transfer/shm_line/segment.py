"""A segment: memory that two processes of one host share, cut into slots that go back and forth.

It has no name in any file system, so that nothing is left when both processes are gone, and it is sealed: a
peer can write what it likes into it but never take it away under a reader.  Each slot belongs to one side at
a time; which one, they tell each other elsewhere.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

import numpy as np

from kv_transfer.config import MAX_MESSAGE_BYTES

SLOT_BYTES = MAX_MESSAGE_BYTES  # of address space; memory is taken only for what is written
MAX_SLOTS = 128
WELCOME = b"twinpool kv 1\n"  # what comes with the memory


class Segment:
    """One end's mapping; it goes when the last view of a slot does.

    Args:
        file: Of the memory; stays the caller's.

    Raises:
        ValueError: It can be shrunk, so that reading it could end this process, or is not cut into slots.
    """

    def __init__(self, file: int) -> None:
        if not _is_sealed(file):
            raise ValueError("memory that its owner can shrink")
        size = os.fstat(file).st_size
        self.num_slots, rest = divmod(size, SLOT_BYTES)
        if rest or not 0 < self.num_slots <= MAX_SLOTS:
            raise ValueError(f"memory of {size} bytes")
        self._bytes = np.frombuffer(mmap.mmap(file, size), np.uint8)

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """Return the first bytes of a slot; not a copy."""
        start = slot * SLOT_BYTES
        return self._bytes[start : start + num_bytes].data


def share_segment(end: socket.socket, num_slots: int) -> Segment:
    """Make a segment and pass it to the peer, over a socket that has not been used yet.

    Raises:
        OSError: There is no memory, no file descriptor, or no peer any more.
    """
    file = os.memfd_create("twinpool-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_slots * SLOT_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
        segment = Segment(file)
        socket.send_fds(end, [WELCOME], [file])
    finally:
        os.close(file)
    return segment


def shared_segment(end: socket.socket) -> Segment:
    """Return the segment that the peer has passed.

    Raises:
        OSError: Nothing has come.
        ValueError: What came is no segment.
    """
    welcome, files, *_ = socket.recv_fds(end, len(WELCOME), 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if welcome != WELCOME or len(files) != 1:
            raise ValueError(f"{len(files)} files with {welcome!r}")
        return Segment(files[0])
    finally:
        for file in files:
            os.close(file)


def _is_sealed(file: int) -> bool:
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) & _seals() == _seals()
    except OSError:  # not memory at all
        return False


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
