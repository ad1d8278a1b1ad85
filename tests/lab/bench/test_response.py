"""Response: any cut of the bytes gives the same body, and what is no HTTP is refused."""

from __future__ import annotations

import pytest

from twinpool.lab.bench.response import Malformed, Response

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nX-Twinpool-Path: local\r\nTransfer-Encoding: Chunked\r\n\r\n"
    b"5\r\nhello\r\nA;name=value\r\n, my world\r\n0\r\nTrailer: 1\r\n\r\n"
)
WITH_LENGTH = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 15\r\n\r\nhello, my world"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\nhello, my world"
AFTER_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("data", [CHUNKED, WITH_LENGTH, UNTIL_CLOSED, AFTER_CONTINUE])
def test_the_body_is_the_same_however_its_bytes_come(data: bytes, size: int) -> None:
    body = bytearray()
    response = Response(body.extend)

    for start in range(0, len(data), size):
        response.feed(data[start : start + size])
    response.close()

    assert bytes(body) == b"hello, my world"
    assert response.is_ended


def test_status_and_headers_are_known_with_their_names_in_lower_case() -> None:
    response = Response(lambda data: None)
    response.feed(CHUNKED)

    assert response.status == 200
    assert response.headers["x-twinpool-path"] == "local"


@pytest.mark.parametrize(
    ("data", "may_follow"),
    [
        (CHUNKED, True),
        (WITH_LENGTH, True),
        (UNTIL_CLOSED, False),
        (WITH_LENGTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), False),
        (WITH_LENGTH.replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (WITH_LENGTH + b"HTTP/1.1 200 OK\r\n\r\n", False),  # nobody asked for a second one
        (CHUNKED[:-2], False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
    ],
)
def test_a_connection_is_used_again_only_where_the_response_has_ended_and_both_agree(
    data: bytes, may_follow: bool
) -> None:
    response = Response(lambda data: None)
    response.feed(data)

    assert response.may_follow is may_follow


@pytest.mark.parametrize("data", [CHUNKED[:-9], WITH_LENGTH[:-1], CHUNKED[:30]])
def test_a_body_that_is_cut_off_has_not_ended(data: bytes) -> None:
    response = Response(lambda data: None)
    response.feed(data)
    response.close()

    assert not response.is_ended


def test_a_part_of_a_chunk_is_handed_on_before_the_chunk_is_whole() -> None:
    body = bytearray()
    response = Response(body.extend)

    response.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\ndata: first\n\n")

    assert bytes(body) == b"data: first\n\n"


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "begins no HTTP response"),
        (b"HTTP/1.1 OK\r\n\r\n", "begins no HTTP response"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "is no header"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n", "'-5' is no length"),
        (HEAD + b"-1\r\n", "is no size of a chunk"),
        (HEAD + b"0x5\r\nhello\r\n", "is no size of a chunk"),
        (HEAD + b"\r\n", "is no size of a chunk"),
        (HEAD + b"5\r\nhelloXX", "ends a chunk"),
        (HEAD + b"f" * 5000, "a chunk's size is longer than 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000, "the head is longer than 65536 bytes"),
    ],
)
def test_what_is_no_http_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        Response(lambda data: None).feed(data)
