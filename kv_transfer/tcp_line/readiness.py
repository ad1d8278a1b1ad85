"""Waiting for a socket that does not block."""

from __future__ import annotations

import asyncio
import socket


async def readable(end: socket.socket) -> None:
    """Return when a read would not wait."""
    loop = asyncio.get_running_loop()
    is_ready = asyncio.Event()
    loop.add_reader(end, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        loop.remove_reader(end)
