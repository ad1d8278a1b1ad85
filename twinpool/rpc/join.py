"""The worker's side of the registry: join the router, stay joined, come back when it was away.

A worker outlives its router: it tries for ever.  Only a refusal ends it, because trying again with the
same settings would be refused again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc.aio

from twinpool.core.errors import (
    ConfigError,
    InvalidRequest,
    LayoutMismatch,
    ServingError,
    Unavailable,
    WorkerLost,
)
from twinpool.core.ports import WorkerInfo, WorkerLoad
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.pb import registry_pb2, registry_pb2_grpc
from twinpool.rpc import codec
from twinpool.rpc.channel import TrustedChannel
from twinpool.rpc.limits import MAX_JOIN_BYTES, channel_options
from twinpool.rpc.serving import EOF
from twinpool.rpc.status import error_of
from twinpool.rpc.token import REGISTRY

MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 0.05, 60.0  # whatever a router asks for

_REFUSALS = (ConfigError, LayoutMismatch, InvalidRequest)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """How patient a worker is with its router."""

    answer_timeout_s: float = 5.0  # for the router's word that the worker is in
    first_pause_s: float = 0.1  # before the second attempt; doubles with each
    max_pause_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 < self.first_pause_s <= self.max_pause_s:
            raise ConfigError("join.first_pause_s", f"{self.first_pause_s} is not in (0, {self.max_pause_s}]")


async def join(
    router_address: str,
    info: Callable[[], WorkerInfo],
    load: Callable[[], WorkerLoad],
    *,
    trust: Trust,
    config: JoinConfig | None = None,
) -> NoReturn:
    """Stay joined to the router until cancelled, which is the leaving.

    Args:
        router_address: Of the router's registry, ``host:port``.
        info: Called for each joining.
        load: Called for each heartbeat.
        trust: Of this process.
        config: How patient to be.

    Raises:
        LayoutMismatch: The worker does not fit the others.
        ConfigError: The router cannot use it or does not trust it, or a newer life of it has joined.
        InvalidRequest: The router cannot read ``info``.
    """
    config = config or JoinConfig()
    pause_s = config.first_pause_s
    while True:
        try:
            reason = await _stay(router_address, info, load, trust, config)
            pause_s = config.first_pause_s
        except _REFUSALS:
            raise
        except ServingError as error:
            reason = str(error)
        _log.warning("not joined to %s, next attempt in %.1f s: %s", router_address, pause_s, reason)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, config.max_pause_s)


async def _stay(
    router_address: str,
    info: Callable[[], WorkerInfo],
    load: Callable[[], WorkerLoad],
    trust: Trust,
    config: JoinConfig,
) -> str:
    """Join once, send loads, and return why the stay ended.

    Raises:
        ServingError: The router was not reached or did not take the worker in, or a refusal ended the stay.
    """
    options = channel_options(max_receive_bytes=MAX_JOIN_BYTES, max_send_bytes=MAX_JOIN_BYTES)
    async with TrustedChannel(
        router_address, trust=trust, to=Party.ROUTER, audience=REGISTRY, options=options
    ) as channel:
        call = registry_pb2_grpc.RegistryStub(channel).Join()  # type: ignore[no-untyped-call]
        try:
            with _errors(channel):
                heartbeat_s = await _enter(call, info(), config)
            try:
                with _errors(channel):
                    await _send_loads(call, load, heartbeat_s)
            except Unavailable as error:
                return str(error)
            return "the router ended the stay"
        finally:
            call.cancel()


async def _enter(call: Any, info: WorkerInfo, config: JoinConfig) -> float:
    """Say who we are, and return how often the router wants to hear from us, in seconds."""
    try:
        async with asyncio.timeout(config.answer_timeout_s):
            await call.initial_metadata()  # of one that is refused, gRPC would forget why if we wrote now
            with suppress(asyncio.InvalidStateError):  # the call is over; the read says why
                await call.write(registry_pb2.JoinMessage(info=codec.info_to_pb(info)))
            reply = await call.read()
    except TimeoutError:
        raise Unavailable("the router did not answer in time") from None
    if reply is EOF or reply is None:
        raise Unavailable("the router ended the stay before it began")
    return max(MIN_HEARTBEAT_S, min(float(reply.heartbeat_s), MAX_HEARTBEAT_S))


async def _send_loads(call: Any, load: Callable[[], WorkerLoad], heartbeat_s: float) -> None:
    """Send a load every ``heartbeat_s`` until the router ends the call."""
    ending = asyncio.ensure_future(call.read())
    try:
        while not ending.done():
            with suppress(asyncio.InvalidStateError):
                await call.write(registry_pb2.JoinMessage(load=codec.load_to_pb(load())))
            await asyncio.wait({ending}, timeout=heartbeat_s)
        await ending
    finally:
        ending.cancel()


@contextmanager
def _errors(channel: TrustedChannel) -> Iterator[None]:
    """Raise what ended the call as a ServingError."""
    try:
        yield
    except grpc.aio.AioRpcError as call_error:
        error = error_of(call_error, worker_id="router", explain=channel.explain)
        if isinstance(error, WorkerLost):
            raise Unavailable(f"the router cannot be reached: {error.reason}") from None
        raise error from None
