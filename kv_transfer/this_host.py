"""Peers on this host: how it is told from others, where they meet, and whose process is at the other end."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from functools import cache
from pathlib import Path

from twinpool.core.errors import ConfigError

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


def unix_socket() -> socket.socket:
    """Return a new one, which does not block."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.setblocking(False)
    return end


def bound(listen: str, host: str) -> tuple[socket.socket, str]:
    """Bind a Unix socket that has no file; return it and its name.

    Args:
        listen: ``HOST/NAME``, and perhaps more after another slash, gives it the name that an earlier life of
            this worker had; with another host, or anything else, it gets one that nobody has.
        host: This one.

    Raises:
        ConfigError: Somebody has the name.
    """
    there, _, rest = listen.partition("/")
    name = rest.partition("/")[0] if there == host else f"twinpool-{secrets.token_hex(16)}"
    end = unix_socket()
    try:
        end.bind(f"\0{name}")
    except OSError as error:
        end.close()
        raise ConfigError("transfer.listen", f"{listen} cannot be bound: {error}") from error
    return end, name


def is_own_user(end: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user; root is one as any other."""
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())
