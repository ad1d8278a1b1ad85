"""Clients that write down how their answers end, and what an operator sees meanwhile.

Knows the HTTP API and process ids; knows nothing of what stands behind them.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinpool.cluster.api_client import ApiClient
from twinpool.core.errors import ServingError

TYPED = frozenset({"worker_lost", "no_workers", "unavailable", "transfer_failed", "transfer_timeout"})
"""The codes that a lost worker may end an answer with."""

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One question; greedy, so that its answer is known from an undisturbed run."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    is_stream: bool = True
    is_new: bool = False  # no worker has computed its prompt, however often it was asked

    def body(self) -> bytes:
        return json.dumps(
            {
                "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt),
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": self.is_stream,
                "cache_salt": uuid.uuid4().hex if self.is_new else None,
            }
        ).encode()


class Call:
    """One client in a thread of its own.

    Attributes:
        ids: The tokens so far.
        status: Of the HTTP answer; 0 until it came.
        retry_after: The header of that name.
        error: The code of the error that ended the answer, if one did.
        num_ends: How often the answer said that it is over: once, unless something is wrong.
        broken: What the client could not make sense of.
        done_s: When it was over, on the monotonic clock.
    """

    def __init__(self, url: str, ask: Ask) -> None:
        self.ask = ask
        self.ids: list[int] = []
        self.status = 0
        self.retry_after: str | None = None
        self.error: str | None = None
        self.num_ends = 0
        self.broken = ""
        self.done_s = 0.0
        self._address = url.removeprefix("http://")
        self._connection: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self, *, within_s: float = _TIMEOUT_S) -> Call:
        """Wait for the end."""
        self._thread.join(within_s)
        assert self.is_over, f"no end within {within_s} s, after {len(self.ids)} tokens"
        return self

    def hang_up(self) -> None:
        """Leave without a word."""
        assert self._connection is not None and self._connection.sock is not None
        self._connection.sock.shutdown(2)

    def describe(self) -> str:
        return (
            f"status {self.status}, {len(self.ids)} tokens, error {self.error}, "
            f"{self.num_ends} ends, {self.broken}"
        )

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        self._connection = connection
        try:
            connection.request(
                "POST", "/v1/completions", self.ask.body(), {"content-type": "application/json"}
            )
            reply = connection.getresponse()
            self.status, self.retry_after = reply.status, reply.getheader("retry-after")
            if reply.status == 200 and self.ask.is_stream:
                self._read_events(reply)
            else:
                self._read_whole(json.loads(reply.read()))
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.broken = f"{type(error).__name__}: {error}"
        finally:
            self.done_s = time.monotonic()
            connection.close()

    def _read_events(self, reply: http.client.HTTPResponse) -> None:
        for line in reply:
            if not line.strip():
                continue
            data = line.decode().removeprefix("data: ").strip()
            if self.num_ends:
                self.broken = f"after the end came {data[:80]}"
            elif data == "[DONE]":
                self.num_ends += 1
            else:
                self._take(json.loads(data))

    def _read_whole(self, body: dict[str, Any]) -> None:
        self._take(body)
        self.num_ends = 1

    def _take(self, body: dict[str, Any]) -> None:
        if "error" in body:
            self.error = str(body["error"]["code"])
            self.num_ends += 1
            return
        for choice in body["choices"]:
            self.ids.extend(choice["token_ids"])


@dataclass(slots=True)
class Caller:
    """Asks one server, and knows the right answers.

    Attributes:
        right: The answers of an undisturbed run.
    """

    client: ApiClient
    right: dict[Ask, list[int]] = field(default_factory=dict)

    def call(self, ask: Ask) -> Call:
        """Begin a call."""
        return Call(self.client.url, ask)

    def learn(self, asks: Sequence[Ask]) -> None:
        """Ask one after the other, undisturbed, and remember the answers."""
        for ask in asks:
            call = self.call(ask).join()
            assert len(call.ids) == ask.max_tokens, call.describe()
            self.right[ask] = call.ids

    def is_right(self, call: Call) -> bool:
        """Whether a call has the whole and right answer."""
        return (
            call.num_ends == 1 and not call.broken and call.error is None and call.ids == self.right[call.ask]
        )

    def check(self, call: Call) -> None:
        """Check that a call that is over has the right answer, or a part of it and one typed error."""
        assert not call.broken and call.num_ends == 1, call.describe()
        assert call.ids == self.right[call.ask][: len(call.ids)], f"wrong tokens: {call.describe()}"
        if call.error is None:
            assert call.ids == self.right[call.ask], call.describe()
        else:
            assert call.error in TYPED, call.describe()
            assert call.status == 200 or call.retry_after is not None or call.status in (502, 504)

    # What an operator sees.

    def workers(self) -> dict[str, dict[str, Any]]:
        """The members of the pool by id."""
        return {worker["id"]: worker for worker in self.client.get("/admin/workers")}

    def audit(self) -> dict[str, dict[str, Any]]:
        """The books of every worker by id."""
        return {worker["id"]: worker for worker in self.client.get("/admin/audit")["workers"]}

    def is_clean(self, *, but: str = "") -> bool:
        """Whether every worker but one answers and holds nothing, and neither does the router."""
        audit = self.client.get("/admin/audit")
        return audit["router"] == {"in_flight": 0, "queued": 0} and all(
            "error" not in worker and not holds(worker) for worker in audit["workers"] if worker["id"] != but
        )

    def metric(self, name: str) -> float:
        """Return the sum over all labels of one metric."""
        with urllib.request.urlopen(f"{self.client.url}/metrics", timeout=_TIMEOUT_S) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[{{ ]", line))

    def is_ready(self) -> bool:
        try:
            self.client.get("/ready")
        except ServingError:
            return False
        return True


def holds(worker: dict[str, Any]) -> bool:
    """Whether a worker's books show that something of a request is left."""
    blocks = worker["blocks"]
    return bool(
        blocks["owned"]
        or blocks["draining"]
        or worker["tickets"]
        or worker["transfers"]
        or worker["sequences"]
    )
