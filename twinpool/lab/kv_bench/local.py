"""Both peers on this machine: the decode peer in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from twinpool.core.errors import Unavailable

_START_LIMIT_S = 120.0
_END_LIMIT_S = 10.0


@asynccontextmanager
async def decode_peer() -> AsyncIterator[tuple[str, int]]:
    """Start one; give where it listens.  It has ended when the block has.

    Raises:
        Unavailable: It does not start.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "twinpool", "kv-bench", "--listen", "127.0.0.1", "--wait", f"{_START_LIMIT_S:g}"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield await _address(process)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_LIMIT_S):
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _address(process: asyncio.subprocess.Process) -> tuple[str, int]:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            line = (await process.stdout.readline()).decode()
    except TimeoutError:
        raise Unavailable(f"the decode peer does not start in {_START_LIMIT_S:g} s") from None
    host, _, port = line.strip().rpartition(" ")[2].rpartition(":")
    if not port.isdecimal():
        raise Unavailable("the decode peer does not start")
    return host, int(port)
