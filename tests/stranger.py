"""A server of another kind than ours."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PAGE = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\n<html>"


@contextmanager
def stranger() -> Iterator[str]:
    """Answer one request with a page that is no JSON; gives HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(_PAGE)

        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
