"""Connections that wait for their next part."""

from __future__ import annotations

import asyncio
from functools import partial

from kv_transfer.tcp_line.byte_stream import ByteStream

_IDLE_S = 30.0  # one that was unused for so long is closed
_MAX_IDLE = 8  # to one peer


class IdleStreams:
    """Connections to peers on which a part was whole, for the next parts."""

    def __init__(self) -> None:
        self._timers: dict[str, dict[ByteStream, asyncio.TimerHandle]] = {}  # by address

    def take(self, address: str) -> ByteStream | None:
        """Return the one that was used last, if there is any."""
        while streams := self._timers.get(address):
            stream = next(reversed(streams))
            self._remove(address, stream)
            if stream.is_whole:
                return stream
            stream.close()
        return None

    def keep(self, address: str, stream: ByteStream) -> None:
        """Keep one until it is taken, has been here for long, or the peer closes it."""
        if not stream.is_whole or len(self._timers.get(address, ())) >= _MAX_IDLE:
            stream.close()
            return
        drop = partial(self._drop, address, stream)
        timer = asyncio.get_running_loop().call_later(_IDLE_S, drop)
        self._timers.setdefault(address, {})[stream] = timer
        stream.expect_nothing(drop)

    def close(self) -> None:
        """Close all."""
        for address, streams in list(self._timers.items()):
            for stream in list(streams):
                self._drop(address, stream)

    def _drop(self, address: str, stream: ByteStream) -> None:
        self._remove(address, stream)
        stream.close()

    def _remove(self, address: str, stream: ByteStream) -> None:
        streams = self._timers[address]
        streams.pop(stream).cancel()
        if not streams:
            del self._timers[address]
