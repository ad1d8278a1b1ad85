"""One request on its way, and the record it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from twinpool.lab.bench.answer import Answer, kind_of
from twinpool.lab.bench.response import Response
from twinpool.lab.bench.strangers import printable, read_json
from twinpool.lab.record import Record
from twinpool.lab.workload.item import WorkItem

_MAX_ERROR_BYTES = 64 * 1024


class SentRequest:
    """An exchange whose answer is a stream of tokens.

    Args:
        item: What is asked.
        request: The same as bytes.
        start_s: When the run began, by the event loop's clock, which all times that come in are of.
        on_end: Called once, when it has ended by itself.
    """

    def __init__(
        self, item: WorkItem, request: bytes, *, start_s: float, on_end: Callable[[SentRequest], None]
    ) -> None:
        self.item = item
        self.request = request
        self.error = ""
        self.message = ""  # what more is known of it, such as what the server said
        self._start_s = start_s
        self._on_end = on_end
        self._sent_s: float | None = None
        self._end_s: float | None = None
        self._now_s = 0.0
        self._failure = bytearray()  # the body of an answer that is no stream
        self._answer = Answer()
        self._response: Response | None = None  # of the last connection

    @property
    def due_s(self) -> float:
        """When it is to be sent, by the event loop's clock."""
        return self._start_s + self.item.arrival_s

    @property
    def is_counted(self) -> bool:
        """Whether the server said how many tokens its answer has."""
        return self._answer.is_counted

    @property
    def is_as_long_as_asked(self) -> bool:
        return self._answer.output_tokens == self.item.output_tokens

    def started(self, now_s: float) -> None:
        self._sent_s = self._sent_s or now_s

    def response(self) -> Response:
        self._response = Response(self._on_body)
        return self._response

    def received(self, now_s: float) -> None:
        self._now_s = now_s

    def ended(self, error: str, now_s: float, reason: str = "") -> None:
        self._end_s = now_s
        self._answer.finish()
        self.message = printable(reason)
        self.error = error or self._problem()
        self._on_end(self)

    def give_up(self, error: str, now_s: float) -> None:
        """Note that the client left, and why."""
        self._end_s, self.error = now_s, error

    def record(self, *, queue_s: float | None = None, kv_bytes: int = 0) -> Record:
        """Return what became of it; what only the server knows is passed in."""
        answer = self._answer
        sent_s = self._end_s if self._sent_s is None else self._sent_s
        assert sent_s is not None, "a request that has not ended has no record"
        return Record(
            index=self.item.index,
            due_s=self.item.arrival_s,
            sent_s=sent_s - self._start_s,
            first_token_s=self._of_run(answer.first_s),
            last_token_s=self._of_run(answer.last_s),
            gaps_s=tuple(answer.gaps_s),
            end_s=self._of_run(self._end_s),
            prompt_tokens=self.item.prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            queue_s=queue_s,
            kv_bytes=kv_bytes,
            path="" if self._response is None else _path(self._response),
            error=self.error,
        )

    @property
    def _status(self) -> int:
        return 0 if self._response is None else self._response.status

    def _of_run(self, time_s: float | None) -> float | None:
        return None if time_s is None else time_s - self._start_s

    def _on_body(self, data: bytes) -> None:
        if self._response is not None and self._response.status == 200:
            self._answer.feed(data, self._now_s)
        elif len(self._failure) < _MAX_ERROR_BYTES:
            self._failure += data

    def _problem(self) -> str:
        if self._status == 200:
            if self._answer.error or not self._answer.is_complete:
                return self._answer.error or "incomplete"
            return "" if self._answer.output_tokens else "empty"
        self.message = printable(bytes(self._failure).decode("utf-8", "replace"))
        try:
            told = read_json(self._failure)
        except ValueError:
            return f"http_{self._status}"
        error = told.get("error") if isinstance(told, Mapping) else None
        return kind_of(error) if isinstance(error, Mapping) else f"http_{self._status}"


def _path(response: Response) -> str:
    """How a Twinpool server answered, without what happened on the way."""
    return printable(response.headers.get("x-twinpool-path", "").partition(";")[0])
