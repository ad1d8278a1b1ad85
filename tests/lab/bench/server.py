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
    def __init__(self, times: Times) -> None:
        self._times = times
        self._log: dict[str, list[float]] = {}
        self._bodies: list[dict[str, object]] = []
        self._num_asked = 0
        self._num_left = 0  # clients that closed before their answer's end
        self._num_connections = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            is_first = True
            while await self._answer(reader, writer, is_first):
                is_first = False
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_first: bool
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        arrived_s = asyncio.get_running_loop().time()
        method, path, _ = head.split(" ", 2)
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET" or path == "/tokenize":
            _whole(writer, self._told(path))
            return True
        asked = json.loads(body)
        if len(self._bodies) < 1000:
            self._bodies.append(asked)
        if asked.get("behave") == "hang_up" and not is_first:
            return False
        self._num_asked += 1
        if self._num_asked == self._times.freeze_after:
            time.sleep(self._times.freeze_s)  # noqa: ASYNC251  # nothing of this process moves
        return await self._stream(reader, writer, headers.get("x-request-id", ""), asked, arrived_s)

    def _told(self, path: str) -> object:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "toy"}]}
        if path == "/tokenize":
            return {"tokens": [11, 12, 13, 11], "count": 4}
        if path == "/log":
            counts = {"connections": self._num_connections, "left": self._num_left}
            return {"times": self._log, "bodies": self._bodies, **counts}
        if path.startswith("/admin/requests/"):
            return {
                "spans": [{"name": "queue", "start_s": 0.0}, {"name": "prefill", "start_s": 0.004}],
                "kv_bytes": 77,
            }
        return {"version": "toy-1"}

    async def _stream(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request_id: str,
        asked: dict[str, object],
        arrived_s: float,
    ) -> bool:
        loop = asyncio.get_running_loop()
        behave = asked.get("behave", "")
        if behave == "refuse":
            _whole(
                writer,
                {"error": {"message": "too many", "code": "queue_full"}},
                status="429 Too Many Requests",
            )
            return True
        if behave == "no_http":
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
            return False
        if behave == "close":
            return False
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        writer.write(b"x-twinpool-path: disaggregated; retried=WorkerLost\r\n\r\n")
        written = self._log.setdefault(request_id, [arrived_s])
        num_tokens = int(asked["max_tokens"])  # type: ignore[call-overload]
        for index in range(num_tokens):
            due_s = arrived_s + self._times.ttft_s + index * self._times.gap_s
            left_s = due_s - loop.time()
            if left_s > 0.0:
                await asyncio.sleep(left_s)
            if reader.at_eof():
                self._num_left += 1
                return False
            written.append(loop.time())
            if behave == "cut" and index == 2:
                return False
            if behave == "error_event" and index == 2:
                _event(writer, {"error": {"message": "lost", "type": "server_error", "code": "worker_lost"}})
                break
            finish = "length" if index == num_tokens - 1 and behave != "no_finish" else None
            _event(writer, {"choices": [{"index": 0, "text": "token ", "finish_reason": finish}]})
        else:
            usage = {
                "prompt_tokens": len(asked["prompt"]),  # type: ignore[arg-type]
                "completion_tokens": num_tokens,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            _event(writer, {"choices": [], "usage": usage})
            if behave != "no_finish":
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n")
        writer.write(b"0\r\n\r\n")
        return True


def _whole(writer: asyncio.StreamWriter, value: object, *, status: str = "200 OK") -> None:
    data = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def _event(writer: asyncio.StreamWriter, value: object) -> None:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _serve(times: Times) -> None:
    context = None
    if times.certificates:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*(Path(times.certificates) / f"router.{end}" for end in ("pem", "key")))
    connected = Server(times).connected
    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=4096, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(_serve(Times(**json.loads(sys.argv[1]))))
