"""From the bytes of a request body to a JSON object, with every limit checked on the way.

It knows no field.  jiter (inside pydantic) does the parsing: it refuses invalid UTF-8, byte-order marks,
lone surrogates, NaN, numbers of thousands of digits and deep nesting by itself, and it is fast.  Of equal
keys the last one counts.
"""

from __future__ import annotations

import asyncio
import math

from pydantic_core import from_json
from starlette.types import Receive, Scope

from router.http.config import HTTPConfig
from router.http.errors import BodyTimeout, BodyTooLarge, MalformedBody
from twinpool.core.errors import RequestCancelled

THREADED_BYTES = 256 * 1024  # larger bodies are parsed beside the event loop

_ALWAYS_FINITE = frozenset({int, str, bool, type(None)})  # lists of them are passed at the speed of C


async def read_object(scope: Scope, receive: Receive, config: HTTPConfig) -> dict[str, object]:
    """Read the whole body and parse it.

    A declared length that is too large is refused before one byte is read.

    Raises:
        BodyTooLarge, BodyTimeout, MalformedBody: As their names say.
        RequestCancelled: The client left before the end of the body.
    """
    _check_declared_length(scope, config)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await _read(receive, config.max_body_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the body did not end within {config.body_timeout_s:g} s") from None
    if len(body) <= THREADED_BYTES:
        return parse_object(body)
    return await asyncio.to_thread(parse_object, body)


def parse_object(body: bytes) -> dict[str, object]:
    """Parse a JSON object whose numbers are all finite.

    Raises:
        MalformedBody: It is none.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise MalformedBody(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedBody("the body is not a JSON object")
    if not _is_finite(value):
        raise MalformedBody("the body has a number that no double can hold")
    return value


def _check_declared_length(scope: Scope, config: HTTPConfig) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > config.max_body_bytes:
            raise BodyTooLarge(f"{int(value)} bytes are more than the {config.max_body_bytes} allowed")


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestCancelled("the client left before the end of its request")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body has more than the {max_bytes} bytes allowed")
        if not message.get("more_body", False):
            return bytes(body)


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_is_finite(item) for item in value.values())
    if isinstance(value, list):
        return set(map(type, value)) <= _ALWAYS_FINITE or all(_is_finite(item) for item in value)
    return True
