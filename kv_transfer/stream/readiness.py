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


async def writable(end: socket.socket) -> None:
    """Return when a write would not wait."""
    loop = asyncio.get_running_loop()
    is_ready = asyncio.Event()
    loop.add_writer(end, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        loop.remove_writer(end)
