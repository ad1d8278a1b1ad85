"""A small Twinpool server for a laboratory: it answers at once, and has workers with roles and books.

Runs in the event loop of the test, which so can change its workers in the middle of a cell.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any


class ToyServer:
    """Prefill and decode workers take requests in turn, each pool for itself.

    Attributes:
        roles: By worker.
        on_request: Is called with the number of each request.
    """

    def __init__(self, *roles: str) -> None:
        self.roles = {f"w{number}": role for number, role in enumerate(roles)}
        self.pairs: list[tuple[str, str]] = []  # that moved KV, in order
        self.cleared_after: list[int] = []  # requests
        self.num_requests = 0
        self.refuses = False
        self.on_request: Callable[[int], None] = lambda number: None
        self._turns = {"prefill": 0, "decode": 0}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve at a free port, which the URL names, until the block ends."""
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = head.split(" ", 2)[1]
                status, kind, data = self._answer(path, json.loads(body or b"{}"))
                text = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
                writer.write(text.encode() + data)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[str, str, bytes]:
        if path == "/v1/completions":
            if self.refuses:
                return "503 No", "application/json", b'{"error": {"message": "full", "code": "queue_full"}}'
            self._place(int(body["max_tokens"]))
            return "200 OK", "text/event-stream", _stream(int(body["max_tokens"]))
        return "200 OK", "application/json", json.dumps(self._told(path, body)).encode()

    def _told(self, path: str, body: dict[str, Any]) -> object:
        if path.startswith("/admin/workers/"):
            self.roles[path.split("/")[3]] = body["role"]
        if path == "/admin/cache/clear":
            self.cleared_after.append(self.num_requests)
        if path.startswith("/admin/requests/"):
            return {"spans": [], "events": [], "kv_bytes": 0}
        return {
            "/v1/models": {"data": [{"id": "toy"}]},
            "/tokenize": {"tokens": [5, 6, 7]},
            "/version": {"version": "toy"},
            "/ready": {"status": "ready"},
            "/admin/deployment": {"settings": {"router": {"heartbeat_s": 0.01}}},
            "/admin/workers": [self._worker(worker_id) for worker_id in self.roles],
        }.get(path, {"ok": True})

    def _worker(self, worker_id: str) -> dict[str, object]:
        return {
            "id": worker_id,
            "role": self.roles[worker_id],
            "generation": 1,
            "received_from": {sender: {"transfers": 1} for sender, to in self.pairs if to == worker_id},
            "counters": {"generated_tokens": self.num_requests},
        }

    def _place(self, max_tokens: int) -> None:
        self.num_requests += 1
        self.on_request(self.num_requests)
        sender = self._pick("prefill")
        receiver = self._pick("decode") if max_tokens > 1 else None  # one token needs no decode worker
        if sender and receiver:
            self.pairs.append((sender, receiver))

    def _pick(self, role: str) -> str | None:
        there = [worker_id for worker_id, its in self.roles.items() if its == role]
        self._turns[role] += 1
        return there[self._turns[role] % len(there)] if there else None


def _stream(num_tokens: int) -> bytes:
    def event(value: object) -> bytes:
        return b"data: " + json.dumps(value).encode() + b"\n\n"

    tokens = [
        event({"choices": [{"text": "a ", "finish_reason": "length" if n == num_tokens - 1 else None}]})
        for n in range(num_tokens)
    ]
    usage = event({"choices": [], "usage": {"prompt_tokens": 64, "completion_tokens": num_tokens}})
    return b"".join(tokens) + usage + b"data: [DONE]\n\n"
