"""One HTTP/1.1 response, read as its bytes come.

Written for many small chunks: one is found with a few searches in the bytes that came, and nothing is built
for it but the slice that is handed on.  Knows no sockets, and nothing of what the body says.

Source:
    RFC 9112: status line and header fields (4, 5), length of a body (6.3), chunks (7.1).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

_MAX_HEAD_BYTES = 64 * 1024
_MAX_LINE_BYTES = 4096  # of a chunk's size and its extensions, or of one trailer field
_SHORT_SIZE = 10  # digits and line end of a chunk's size, as nearly all have it
_HEX = frozenset(b"0123456789abcdefABCDEF")


class Malformed(Exception):
    """What came is no HTTP response."""


class _Part(Enum):
    HEAD = auto()
    SIZE = auto()  # a chunk's
    DATA = auto()  # of a chunk
    TRAILER = auto()
    LENGTH = auto()  # a body of known length
    REST = auto()  # a body that ends with the connection
    END = auto()


class Response:
    """Fed with bytes; hands on the body's.

    Args:
        on_body: Called with each piece of the body as it comes.
    """

    def __init__(self, on_body: Callable[[bytes], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case; of several with one name, the last
        self._on_body = on_body
        self._part = _Part.HEAD
        self._rest = b""  # what came and is not yet understood
        self._left = 0  # bytes of the body, or of this chunk and the line end behind it

    @property
    def is_ended(self) -> bool:
        return self._part is _Part.END

    @property
    def is_chunked(self) -> bool:
        """Whether a body in chunks goes on."""
        return self._part in (_Part.SIZE, _Part.DATA, _Part.TRAILER)

    @property
    def may_follow(self) -> bool:
        """Whether the connection can be used for another request after this one."""
        return self.is_ended and not self._rest and self._is_kept

    def feed(self, data: bytes) -> None:
        """Take what came next.

        Raises:
            Malformed: It is no HTTP, or a head or a line is far too long.
        """
        self._rest = self._rest + data if self._rest else data
        if self._part is _Part.SIZE:
            self._whole_chunks()
        while self._rest and self._step():
            pass

    def close(self) -> None:
        """Note that the connection has ended; this ends a body without a length, and no other."""
        if self._part is _Part.REST:
            self._part = _Part.END

    def _whole_chunks(self) -> None:
        """Read the chunks that are all there, without a step for each of their parts."""
        data, start = self._rest, 0
        while True:
            line_end = data.find(b"\r\n", start, start + _SHORT_SIZE)
            if line_end < 0 or not _HEX.issuperset(data[start:line_end]):
                break
            begin = line_end + 2
            end = begin + int(data[start:line_end] or b"0", 16)
            if end == begin or data[end : end + 2] != b"\r\n":
                break
            self._on_body(data[begin:end])
            start = end + 2
        self._rest = data[start:]

    def _step(self) -> bool:
        """Read one thing from what is there; False: it is not all there."""
        match self._part:
            case _Part.SIZE:
                return self._size()
            case _Part.DATA:
                return self._data()
            case _Part.HEAD:
                return self._head()
            case _Part.TRAILER:
                return self._trailer()
            case _Part.LENGTH:
                return self._length()
            case _Part.REST:
                body, self._rest = self._rest, b""
                self._on_body(body)
                return False
            case _Part.END:
                return False

    def _size(self) -> bool:
        end = self._rest.find(b"\r\n")
        if end < 0:
            return self._too_long(_MAX_LINE_BYTES, "a chunk's size")
        digits = self._rest[:end].partition(b";")[0].strip(b" \t")
        if not digits or len(digits) > 16 or not _HEX.issuperset(digits):
            raise Malformed(f"{digits[:20]!r} is no size of a chunk")
        size = int(digits, 16)
        self._rest = self._rest[end + 2 :]
        self._left = size + 2
        self._part = _Part.DATA if size else _Part.TRAILER
        return True

    def _data(self) -> bool:
        if len(self._rest) < self._left:  # hand on what there is: a token may be in it
            part = self._rest[: max(0, self._left - 2)]
            if part:
                self._rest = self._rest[len(part) :]
                self._left -= len(part)
                self._on_body(part)
            return False
        body, end = self._rest[: self._left - 2], self._rest[self._left - 2 : self._left]
        if end != b"\r\n":
            raise Malformed(f"{end!r} ends a chunk")
        self._rest = self._rest[self._left :]
        self._part = _Part.SIZE
        if body:
            self._on_body(body)
        return True

    def _head(self) -> bool:
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            return self._too_long(_MAX_HEAD_BYTES, "the head")
        first, *lines = self._rest[:end].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdigit() or rest[3:4] not in ("", " "):
            raise Malformed(f"{first[:40]!r} begins no HTTP response")
        self._rest = self._rest[end + 4 :]
        self.status = int(rest[:3])
        if 100 <= self.status < 200:
            return True
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise Malformed(f"{line[:40]!r} is no header")
            self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self._is_kept = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
        self._begin_body()
        return True

    def _begin_body(self) -> None:
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            self._part = _Part.END
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._part = _Part.SIZE
        elif length is None:
            self._part, self._is_kept = _Part.REST, False
        elif not length.isdecimal():
            raise Malformed(f"{length[:20]!r} is no length")
        else:
            self._left = int(length)
            self._part = _Part.LENGTH if self._left else _Part.END

    def _length(self) -> bool:
        body = self._rest[: self._left]
        self._rest = self._rest[len(body) :]
        self._left -= len(body)
        if not self._left:
            self._part = _Part.END
        self._on_body(body)
        return True

    def _trailer(self) -> bool:
        end = self._rest.find(b"\r\n")
        if end < 0:
            return self._too_long(_MAX_LINE_BYTES, "a trailer")
        if end == 0:
            self._part = _Part.END
        self._rest = self._rest[end + 2 :]
        return True

    def _too_long(self, most: int, what: str) -> bool:
        if len(self._rest) > most:
            raise Malformed(f"{what} is longer than {most} bytes")
        return False
