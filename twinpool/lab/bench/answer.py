"""One streamed answer of an OpenAI endpoint: when its tokens came, and what it says of itself.

Reads the events of both routes and of any server: a chunk counts when it carries text, however many tokens
the text has.  Knows no HTTP; the time of each piece is passed in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from twinpool.lab.bench.strangers import printable, read_count, read_json

_MAX_EVENT_BYTES = 16 * 1024 * 1024
_SHOWN = (
    "content",
    "reasoning_content",
    "reasoning",
    "refusal",
    "tool_calls",
)  # what a chat's delta may carry

_TEXT = re.compile(rb'"(?:text|content)"\s*:\s*"[^"]')


class Answer:
    """Fed with the pieces of the body.

    Attributes:
        first_s: When the first text came; of an answer without any, when it was finished.
        last_s: When the last text came.
        gaps_s: Between one chunk with text and the next.
        usage: The server's own count, if it sent one.
        error: Kind of the error that the server sent in the stream; empty: none.
        is_done: ``[DONE]`` came.
    """

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.gaps_s: list[float] = []
        self.usage: Mapping[str, Any] = {}
        self.error = ""
        self.is_done = False
        self._finished_s: float | None = None
        self._rest = b""  # the beginning of a line
        self._is_after_cr = False  # what came last ended so, and perhaps the line end goes on
        self._data: list[bytes] = []  # lines of the event that goes on

    @property
    def is_complete(self) -> bool:
        """Whether all of it came: ``[DONE]``, or at least a reason to finish."""
        return not self.error and (self.is_done or self._finished_s is not None)

    @property
    def output_tokens(self) -> int:
        """As the server counted; otherwise one for each chunk with text."""
        counted = read_count(self.usage.get("completion_tokens"))
        if counted is not None:
            return counted
        return 0 if self.last_s is None else len(self.gaps_s) + 1

    @property
    def is_counted(self) -> bool:
        """Whether the server said how many tokens it has; a chunk may hold several."""
        return read_count(self.usage.get("completion_tokens")) is not None

    @property
    def prompt_tokens(self) -> int | None:
        """As the server counted."""
        return read_count(self.usage.get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server had computed before."""
        details = self.usage.get("prompt_tokens_details")
        return read_count(details.get("cached_tokens")) or 0 if isinstance(details, Mapping) else 0

    def feed(self, data: bytes, now_s: float) -> None:
        """Take a piece of the body that came at ``now_s``.

        Raises:
            ValueError: An event is no JSON object, or far too long.
        """
        is_one = data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2
        if is_one and not (self._rest or self._data or self._is_after_cr):
            self._event(data[6:-2], now_s)
            return
        if self._is_after_cr and data.startswith(b"\n"):  # the other half of a line end that was cut
            data = data[1:]
        self._is_after_cr = data.endswith(b"\r")
        lines = (self._rest + data if self._rest else data).splitlines()
        self._rest = b"" if data.endswith((b"\r", b"\n")) or not lines else lines.pop()
        for line in lines:
            if not line:
                if self._data:
                    event, self._data = b"\n".join(self._data), []
                    self._event(event, now_s)
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {_MAX_EVENT_BYTES} bytes")

    def finish(self) -> None:
        """Note that the body has ended."""
        if self.first_s is None and self.output_tokens:
            self.first_s = self.last_s = self._finished_s

    def _event(self, data: bytes, now_s: float) -> None:
        if _is_plain(data):
            self._text(now_s)
            return
        if data.strip() == b"[DONE]":
            self.is_done = True
            self._finished_s = now_s if self._finished_s is None else self._finished_s
            return
        chunk = read_json(data)
        if not isinstance(chunk, dict):
            raise ValueError("an event is not a JSON object")
        if chunk.get("error"):
            self.error = kind_of(chunk["error"])
        choices = chunk.get("choices") or []
        if not isinstance(choices, list):
            raise ValueError("the choices are no list")
        for choice in choices:
            if _has_text(choice):
                self._text(now_s)
            if choice.get("finish_reason"):
                self._finished_s = now_s
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage

    def _text(self, now_s: float) -> None:
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s


def _is_plain(event: bytes) -> bool:
    """Say whether an event carries text and nothing else that counts, as nearly all do, without parsing it.

    In JSON an unescaped quote ends a text, so what is found here are keys, never a part of somebody's text.
    An event that looks plain is; one that does not may be nevertheless.
    """
    goes_on = b'"finish_reason":null' in event or b'"finish_reason": null' in event
    has_more = b'"usage"' in event or b'"error"' in event
    return goes_on and not has_more and _TEXT.search(event) is not None


def kind_of(error: object) -> str:
    """Return the code of an error as OpenAI's servers say it, or what comes nearest."""
    if isinstance(error, Mapping):
        for name in ("code", "type"):
            if isinstance(error.get(name), str) and error[name]:
                return printable(error[name])
    return "server_error"


def _has_text(choice: object) -> bool:
    if not isinstance(choice, dict):
        raise ValueError("a choice is not a JSON object")
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in _SHOWN)
