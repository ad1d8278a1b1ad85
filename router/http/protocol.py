"""One HTTP/1.1 connection: uvicorn's h11 protocol, with an eye on clients that leave and on slow ones.

A FIN from the client means one of two things: it closed its socket and is gone, or it only finished sending
and still reads ("half-close").  TCP shows no difference until something is written to it: a peer that is gone
answers with a reset.  So from the FIN on, harmless bytes are written every ``PROBE_S`` until the answer
starts (``100 Continue``, which clients skip) and between the events of a stream (an SSE comment, which
clients skip too), and the reset ends the request as a disconnect.  The same is done while reading is paused,
since then a FIN could not be seen.  HTTP/1.0 knows no interim answers: there a FIN counts as leaving.

It knows HTTP and no route.

Source:
    RFC 9110, 15.2 (a client must be able to parse 1xx responses, and may ignore them); RFC 9112, 9.6.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from router.http.errors import HeadersTooLarge, MalformedBody, error_bytes, verdict_of
from twinpool.core.errors import ServingError

PROBE_S = 0.4  # two probes find a client that left: the first is answered by a reset, which the second meets
CHECK_S = 0.1
LINGER_S = 5.0  # how long a closed connection may take to deliver its last bytes


class Connection(H11Protocol):
    """A connection that answers half-closed clients and drops those that left.

    Args:
        header_timeout_s: From the first byte of a request (or the start of the connection) to the end of
            its headers.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        header_timeout_s: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.app = self._noting_streams(self.app)
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._is_peer_done = False  # it sent its FIN
        self._is_event_stream = False  # the answer under way is one
        self._checks = 0
        self._closing_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self._header_timeout_s, self._headers_are_late)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._watch_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_the_headers()
        self._begin_to_watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the transport open: the client may still read."""
        self._is_peer_done = True
        if self.transport.is_closing():
            return False
        # A request that is cut in its body cannot be answered.
        if not self._is_answering() or self.cycle.more_body or self.scope["http_version"] == "1.0":
            self.transport.close()
        self._begin_to_watch()
        return True

    def on_response_complete(self) -> None:
        self._is_event_stream = False
        super().on_response_complete()
        if self._is_peer_done and not self._is_answering():
            self.transport.close()
        else:
            self._time_the_headers()

    def send_400_response(self, msg: str) -> None:
        """Tell of a request that h11 could not parse, in the API's own shape, and close."""
        refusal = _refusal_of(sys.exception())
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(refusal)
        self.transport.close()

    def _refuse(self, refusal: ServingError) -> None:
        body = error_bytes(refusal)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events: tuple[h11.Event, ...] = (
            h11.Response(status_code=verdict_of(refusal).status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _time_the_headers(self) -> None:
        """Keep a timer running exactly while a request has begun and its headers have not ended."""
        waits = not self._is_answering() and bool(self.conn.trailing_data[0])
        if waits and self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout_s, self._headers_are_late)
        elif not waits and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_are_late(self) -> None:
        self._header_timer = None
        self.transport.close()

    def _begin_to_watch(self) -> None:
        if self._watch_timer is None and self._is_worth_watching():
            self._checks = 0
            self._watch_timer = self.loop.call_later(0.0, self._watch)

    def _is_worth_watching(self) -> bool:
        """Whether the client could leave without the transport's notice."""
        return self.transport.is_closing() or (
            self._is_answering() and (self._is_peer_done or self.flow.read_paused)
        )

    def _watch(self) -> None:
        self._watch_timer = None
        if not self._is_worth_watching():
            return
        self._watch_timer = self.loop.call_later(CHECK_S, self._watch)
        if self.transport.is_closing():  # the last bytes are under way, to a peer that may never read them
            self._closing_s += CHECK_S
            if self._closing_s > LINGER_S:
                self.transport.abort()
        elif self._is_reset():
            self.transport.abort()
        elif self._checks % round(PROBE_S / CHECK_S) == 0 and not self.flow.write_paused:
            self._probe()
        self._checks += 1

    def _is_reset(self) -> bool:
        """Whether the peer answered a probe with a reset; while nobody reads, nobody else sees it."""
        peer: socket.socket = self.transport.get_extra_info("socket")
        return peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.ECONNRESET, errno.EPIPE)

    def _probe(self) -> None:
        event: h11.Event
        if not self.cycle.response_started and self.scope["http_version"] != "1.0":
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        elif self.cycle.response_started and self._is_event_stream:
            event = h11.Data(data=b": ping\n\n")
        else:
            return
        self.transport.write(self.conn.send(event) or b"")

    def _noting_streams(self, app: ASGIApp) -> ASGIApp:
        """Wrap ``app`` so that the connection knows when an answer is a stream of events."""

        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_and_note(message: Message) -> None:
                await send(message)
                if message["type"] == "http.response.start":
                    kinds = [value for name, value in message["headers"] if name == b"content-type"]
                    self._is_event_stream = kinds != [] and kinds[0].startswith(b"text/event-stream")

            try:
                await app(scope, receive, send_and_note)
            finally:
                self.loop.call_soon(self._begin_to_watch)  # after uvicorn has closed what was left incomplete

        return noting


def _refusal_of(error: BaseException | None) -> ServingError:
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
        return HeadersTooLarge("the headers are too large")
    return MalformedBody("this is no valid HTTP request")
