"""A small server that answers as OpenAI's do, at times that are known, in a process of its own.

It writes down when each request arrived and when it wrote each token of the answer.  A field ``behave`` of a
request asks for what a server should not do.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from twinpool.lab.bench.loop import precise_loop


@dataclass(frozen=True)
class Times:
    ttft_s: float = 0.0
    gap_s: float = 0.0
    freeze_after: int = 0  # generating requests; 0: never
    freeze_s: float = 0.0  # for so long the whole process does nothing
    tokenizes: bool = True  # it has a route that says its tokens
    told: str = ""  # JSON that it says of any request; empty: what a Twinpool server would say
    certificates: str = ""  # a folder as `twinpool certs` makes it; with one, the server talks TLS


@contextmanager
def serving(times: Times | None = None) -> Iterator[str]:
    """Run the server in a process of its own, and yield its URL."""
    command = [sys.executable, "-m", "tests.lab.bench.server", json.dumps(asdict(times or Times()))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            scheme = "https" if times is not None and times.certificates else "http"
            yield f"{scheme}://localhost:{int(process.stdout.readline())}"
        finally:
            process.kill()


class Server:
    """What all connections share: times, and books of what came."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.log: dict[str, list[float]] = {}
        self.bodies: list[dict[str, object]] = []
        self.num_asked = 0
        self.num_left = 0  # clients that closed before their answer's end
        self.num_connections = 0

    def told(self, path: str) -> object:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "toy"}]}
        if path == "/tokenize" and self.times.tokenizes:
            return {"tokens": [11, 12, 13, 11], "count": 4}
        if path == "/log":
            counts = {"connections": self.num_connections, "left": self.num_left}
            return {"times": self.log, "bodies": self.bodies, **counts}
        if path.startswith("/admin/requests/") and self.times.told:
            return json.loads(self.times.told)
        if path.startswith("/admin/requests/"):
            spans = [  # room is reserved on the decode worker after the wait and before the prefill
                {"name": "queue", "start_s": 0.0, "end_s": 0.004},
                {"name": "prefill", "start_s": 0.009, "end_s": 0.1},
                {"name": "queue", "start_s": 0.1, "end_s": 0.2},  # for another try
            ]
            return {"spans": spans, "kv_bytes": 77}
        return {"version": "toy-1"}


class Connection(asyncio.Protocol):
    """Answers one request after the other; written without tasks, so that its own times are true."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._now_s = asyncio.get_running_loop().time
        self._came = b""
        self._num_answered = 0
        self._next: asyncio.TimerHandle | None = None  # token

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.num_connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()
            self._server.num_left += 1

    def data_received(self, data: bytes) -> None:
        arrived_s = self._now_s()
        self._came += data
        head, end, body = self._came.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if end)
        if not end or len(body) < int(headers.get("content-length", 0)):
            return
        self._came = b""
        method, path, _ = head.decode().split(" ", 2)
        if method == "GET" or path == "/tokenize":
            _whole(self._transport, self._server.told(path))
        else:
            self._generate(json.loads(body), headers.get("x-request-id", ""), arrived_s)
        self._num_answered += 1

    def _generate(self, asked: dict[str, object], request_id: str, arrived_s: float) -> None:
        server, behave = self._server, str(asked.get("behave", ""))
        if behave == "hang_up" and self._num_answered:
            self._transport.close()
            return
        if len(server.bodies) < 1000:
            server.bodies.append(asked)
        server.num_asked += 1
        if server.num_asked == server.times.freeze_after:
            time.sleep(server.times.freeze_s)  # nothing of this process moves
        if behave == "refuse":
            error = {"error": {"message": "too many", "code": "queue_full"}}
            _whole(self._transport, error, status="429 Too Many Requests")
        elif behave == "no_http":
            self._transport.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        elif behave == "refuse_deep":
            data = b"[" * 100_000
            self._transport.write(b"HTTP/1.1 500 No\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
        elif behave == "close":
            self._transport.close()
        elif "says" in asked:  # the whole body, word for word
            data = str(asked["says"]).encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(head % len(data) + data)
        else:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
                b"x-twinpool-path: disaggregated; retried=WorkerLost\r\n\r\n"
            )
            written = server.log.setdefault(request_id, [arrived_s])
            self._wait(0, asked, behave, written)

    def _wait(self, index: int, asked: dict[str, object], behave: str, written: list[float]) -> None:
        times = self._server.times
        due_s = written[0] + times.ttft_s + index * times.gap_s
        loop = asyncio.get_running_loop()
        self._next = loop.call_at(due_s, self._token, index, asked, behave, written)

    def _token(self, index: int, asked: dict[str, object], behave: str, written: list[float]) -> None:
        self._next = None
        num_tokens = int(asked["max_tokens"])  # type: ignore[call-overload]
        is_last = index == num_tokens - 1
        written.append(self._now_s())
        if index == 2 and behave == "cut":
            self._transport.close()
            return
        if index == 2 and behave == "error_event":
            error = {"message": "lost", "type": "server_error", "code": "worker_lost"}
            self._transport.write(_event({"error": error}) + b"0\r\n\r\n")
            return
        finish = "length" if is_last and behave != "no_finish" else None
        token = _event({"choices": [{"index": 0, "text": "token ", "finish_reason": finish}]})
        if not is_last:
            self._transport.write(token)
            self._wait(index + 1, asked, behave, written)
            return
        usage = {
            "prompt_tokens": len(asked["prompt"]),  # type: ignore[arg-type]
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        done = b"" if behave == "no_finish" else b"e\r\ndata: [DONE]\n\n\r\n"
        end = b"" if behave.startswith("end_cut_at_") else b"0\r\n\r\n"
        self._transport.write(token + _event({"choices": [], "usage": usage}) + done + end)
        if not end:
            cut = int(behave.removeprefix("end_cut_at_"))
            self._transport.write(b"0\r\n\r\n"[:cut])
            later = asyncio.get_running_loop().call_later
            later(0.05, self._transport.write, b"0\r\n\r\n"[cut:])


def _whole(transport: asyncio.Transport, value: object, *, status: str = "200 OK") -> None:
    data = json.dumps(value).encode()
    transport.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def _event(value: object) -> bytes:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(times: Times) -> None:
    context = None
    if times.certificates:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*(Path(times.certificates) / f"router.{end}" for end in ("pem", "key")))
    books = Server(times)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(books), "127.0.0.1", 0, backlog=4096, ssl=context
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(_serve(Times(**json.loads(sys.argv[1]))))
