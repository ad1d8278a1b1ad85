"""Peers on this host: how it is told from others, and whose process is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
from functools import cache
from pathlib import Path

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid of SO_PEERCRED


@cache
def host_id(*namespaces: str) -> str:
    """Name this boot of this host, and namespaces that processes must share to reach each other.

    Args:
        namespaces: As in ``/proc/self/ns``: ``net`` for a socket without a file.

    Raises:
        OSError: The system does not tell.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return ".".join((boot, *(str(Path("/proc/self/ns", name).stat().st_ino) for name in namespaces)))


def is_own_user(end: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user; root is one as any other."""
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())
