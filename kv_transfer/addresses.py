"""Transports that have a port: where they listen, what they tell peers, and how their sockets are tuned."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import ExitStack

from kv_transfer.config import TransferConfig
from twinpool.core.errors import ConfigError

_WILDCARDS = ("", "0.0.0.0", "::")
_TUNING = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 3,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,  # ms
}


def where_to_listen(config: TransferConfig) -> tuple[str, str]:
    """Return the HOST:PORT to listen on, and the host that peers connect to, without brackets.

    Raises:
        ConfigError: It is none, or every address there is, to which no peer can connect.
    """
    listen = config.listen or "127.0.0.1:0"
    try:
        own_host, _ = split(listen)
    except ValueError as error:
        raise ConfigError("transfer.listen", str(error)) from None
    host = _unbracketed(config.advertise_host) or own_host
    if host in _WILDCARDS:
        raise ConfigError("transfer.advertise_host", f"needed, since no peer can connect to {listen}")
    return listen, host


def listening(config: TransferConfig) -> tuple[socket.socket, str]:
    """Listen; return the socket, which does not block, and the HOST:PORT that peers connect to.

    Raises:
        ConfigError: As ``where_to_listen``, or the address is taken or is none of this machine.
    """
    listen, told_host = where_to_listen(config)
    host, port = split(listen)
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind))
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a worker may start again at once
            listener.bind(place)
            listener.listen()  # until then a second worker could bind it as well
            stack.pop_all()
    except (OSError, UnicodeError) as error:
        raise ConfigError("transfer.listen", f"{listen} cannot be bound: {error}") from error
    return listener, joined(told_host, listener.getsockname()[1])


def split(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``.

    Raises:
        ValueError: It is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"{address} is not of the form HOST:PORT")
    if ":" in host and not (host.startswith("[") and _is_ipv6(_unbracketed(host))):
        raise ValueError(f"{address} is not of the form HOST:PORT: an IPv6 address needs brackets")
    return _unbracketed(host), int(port)


def joined(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tune(end: socket.socket) -> None:
    """Let small messages go at once, and a peer that vanished without a word be noticed within 15 s."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TUNING.items():
        if hasattr(socket, name):  # not every system has all of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _unbracketed(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
