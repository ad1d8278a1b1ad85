"""The connection between the two peers of a measurement: one JSON object per line, in turns.

It carries words only; what is measured goes another way.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kv_transfer.wire_errors import error_named
from twinpool.core.errors import ConfigError, ServingError, Unavailable, Untrusted
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.tls import Party, check_peer, names_in

MAX_LINE_BYTES = 2**20
MEETING_S = 10.0
_CALL_S = 120.0  # for anything that a peer does because the other one asks
_PROTOCOL = 1  # changes whenever two builds would misunderstand each other


class Talk:
    """One end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, message: Mapping[str, Any]) -> None:
        """Send a line.

        Raises:
            Unavailable: The other end is gone.
        """
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()
        except OSError as error:
            raise Unavailable(f"the other side is gone: {error}") from None

    async def hear(self, *, timeout_s: float) -> dict[str, Any]:
        """Return the next line.

        Raises:
            Unavailable: None came in time, the other end is gone, or it is no JSON object.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._reader.readline()
        except TimeoutError:
            raise Unavailable(f"the other side said nothing for {timeout_s:g} s") from None
        except (OSError, ValueError) as error:  # the line is too long
            raise Unavailable(f"the other side is gone: {error}") from None
        if not line:
            raise Unavailable("the other side is gone")
        with suppress(ValueError, RecursionError):
            message = json.loads(line)
            if isinstance(message, dict):
                return message
        raise Unavailable("the other side speaks another language")

    async def call(self, what: str, *, timeout_s: float = _CALL_S, **arguments: Any) -> dict[str, Any]:
        """Ask the other end to do something and return its answer.

        Raises:
            ConfigError, TransferError: What it raised.
            Unavailable: It is gone.
        """
        await self.say({"call": what, **arguments})
        answer = await self.hear(timeout_s=timeout_s)
        if "error" in answer:
            raise _error_of(answer)
        return answer

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


def error_answer(error: ServingError) -> dict[str, str]:
    """Return what a peer answers in place of a result."""
    if isinstance(error, ConfigError):
        return {"error": "ConfigError", "field": error.field, "text": error.problem}
    return {"error": type(error).__name__, "text": str(error)}


def _error_of(answer: Mapping[str, Any]) -> ServingError:
    if answer["error"] == "ConfigError":
        return ConfigError(str(answer.get("field")), f"the other side: {answer.get('text')}")
    return error_named(str(answer["error"]), f"the other side: {answer.get('text')}")


async def connect(host: str, port: int, trust: Trust) -> Talk:
    """Connect to a listening peer and prove who this is.

    Raises:
        ConfigError: Nobody listens there, or it is somebody else.
        Unavailable: It does not speak as a peer does.
    """
    tls = trust.tls
    try:
        async with asyncio.timeout(MEETING_S):
            streams = await asyncio.open_connection(
                host,
                port,
                limit=MAX_LINE_BYTES,
                ssl=None if tls is None else tls.client_context(),
                server_hostname=None if tls is None else Party.WORKER.dns_name,
            )
    except (OSError, TimeoutError) as error:
        raise ConfigError(
            "--connect", f"{host}:{port} does not answer: {error or 'it takes too long'}"
        ) from None
    talk = Talk(*streams)
    greeting = await talk.hear(timeout_s=MEETING_S)
    if greeting.get("kv_bench") != _PROTOCOL:
        raise ConfigError("--connect", f"{host}:{port} is no kv-bench of this version")
    await talk.call("prove", proof=_proof(trust.secret, str(greeting.get("nonce"))), timeout_s=MEETING_S)
    return talk


async def welcome(talk: Talk, writer: asyncio.StreamWriter, trust: Trust) -> None:
    """Greet whoever has connected, and let it prove who it is.

    Raises:
        Untrusted: It cannot.
        Unavailable: It does not speak as a peer does.
    """
    if trust.tls is not None:
        check_peer(names_in(writer.get_extra_info("peercert")), Party.WORKER)
    nonce = secrets.token_hex(16)
    await talk.say({"kv_bench": _PROTOCOL, "nonce": nonce})
    answer = await talk.hear(timeout_s=MEETING_S)
    try:
        proof = bytes.fromhex(str(answer.get("proof")))
    except ValueError:
        proof = b""
    if not trust.secret.is_signed(proof, "kv-bench", nonce):
        refusal = Untrusted("security.secret_file", "the other side holds another secret")
        await talk.say(error_answer(refusal))
        raise refusal
    await talk.say({})


def _proof(secret: Secret, nonce: str) -> str:
    return secret.sign("kv-bench", nonce).hex()
