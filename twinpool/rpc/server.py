"""The gRPC server of a worker: three ports and the standard health service on one address.

A call is a coroutine of a port and nothing else: its deadline is the request's time, its cancellation
cancels the coroutine, and that is the abort.  What one call raises ends that call alone.  Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinpool.core.errors import DeadlineExceeded, InvalidRequest
from twinpool.core.ports import DecodePort, PrefillPort, WorkerPort
from twinpool.core.request import TokenOutput
from twinpool.pb import types_pb2, worker_pb2, worker_pb2_grpc
from twinpool.rpc import codec
from twinpool.rpc.door import Door
from twinpool.rpc.limits import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES, server_options
from twinpool.rpc.serving import Context, bind, join_address, one_call

REQUEST_SERVICES = ("", "twinpool.v1.Prefill", "twinpool.v1.Decode")  # "" is the worker as a whole
CONTROL_SERVICES = ("twinpool.v1.Worker",)
STALLED_AFTER_S = 5.0  # work and no step for so long is not healthy
WATCH_INTERVAL_S = 0.5


class WorkerServer:
    """Hosts a worker's ports.

    Args:
        prefill: Called for Prefill.
        decode: Called for Decode.
        worker: Called for Worker, and asked for the state that the health service tells.
        door: Lets the router in.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
    """

    def __init__(
        self,
        *,
        prefill: PrefillPort,
        decode: DecodePort,
        worker: WorkerPort,
        door: Door,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._server = grpc.aio.server(
            interceptors=[door],
            options=server_options(max_receive_bytes=MAX_REQUEST_BYTES, max_send_bytes=MAX_ANSWER_BYTES),
        )
        worker_pb2_grpc.add_PrefillServicer_to_server(_Prefill(prefill), self._server)  # type: ignore[no-untyped-call]
        worker_pb2_grpc.add_DecodeServicer_to_server(_Decode(decode), self._server)  # type: ignore[no-untyped-call]
        worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(worker), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(_Health(worker), self._server)
        self._host = host
        self.port = bind(self._server, host, port, door.trust)

    @property
    def address(self) -> str:
        """What a client on this host connects to."""
        return join_address(self._host, self.port)

    async def start(self) -> None:
        """Answer calls from now on."""
        await self._server.start()

    async def stop(self, *, grace_s: float) -> None:
        """Take no new call, give running ones ``grace_s`` to end, and cancel the rest."""
        await self._server.stop(grace_s)


class _Prefill(worker_pb2_grpc.PrefillServicer):
    def __init__(self, port: PrefillPort) -> None:
        self._port = port

    async def Prefill(self, message: worker_pb2.PrefillRequest, context: Context) -> types_pb2.TokenOutput:
        async with one_call(context):
            request = codec.request_from_pb(message.request, timeout_s=_time_left_s(context))
            ticket = codec.ticket_from_pb(message.ticket) if message.HasField("ticket") else None
            return codec.output_to_pb(await self._port.prefill(request, ticket))


class _Decode(worker_pb2_grpc.DecodeServicer):
    def __init__(self, port: DecodePort) -> None:
        self._port = port

    async def Reserve(self, message: worker_pb2.ReserveRequest, context: Context) -> types_pb2.KVTicket:
        async with one_call(context):
            request = codec.request_from_pb(message.request, timeout_s=_time_left_s(context))
            sender_id = codec.sender_from_pb(message)
            return codec.ticket_to_pb(await self._port.reserve(request, sender_id=sender_id))

    async def Resume(self, message: worker_pb2.ResumeRequest, context: Context) -> None:
        async with one_call(context):
            _time_left_s(context)
            ticket, first = codec.ticket_from_pb(message.ticket), codec.output_from_pb(message.first)
            await _stream(self._port.resume(ticket, first), context)

    async def Generate(self, message: types_pb2.Request, context: Context) -> None:
        async with one_call(context):
            request = codec.request_from_pb(message, timeout_s=_time_left_s(context))
            await _stream(self._port.generate(request), context)

    async def Release(self, message: types_pb2.KVTicket, context: Context) -> types_pb2.TransferReport:
        async with one_call(context):
            _time_left_s(context)
            return codec.report_to_pb(await self._port.release(codec.ticket_from_pb(message)))


class _Worker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, port: WorkerPort) -> None:
        self._port = port

    async def Status(self, _message: worker_pb2.StatusRequest, context: Context) -> types_pb2.WorkerLoad:
        async with one_call(context):
            _time_left_s(context)
            return codec.load_to_pb(await self._port.status())

    async def Drain(self, message: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainReply:
        async with one_call(context):
            _time_left_s(context)
            empty = await self._port.drain(timeout_s=codec.timeout_from_pb(message))
            return worker_pb2.DrainReply(empty=empty)

    async def Audit(self, _message: worker_pb2.AuditRequest, context: Context) -> worker_pb2.AuditReply:
        async with one_call(context):
            _time_left_s(context)
            return codec.audit_to_pb(await self._port.audit())

    async def ClearCache(
        self, _message: worker_pb2.ClearCacheRequest, context: Context
    ) -> worker_pb2.ClearCacheReply:
        async with one_call(context):
            _time_left_s(context)
            return worker_pb2.ClearCacheReply(freed_blocks=await self._port.clear_cache())

    async def Assign(self, message: worker_pb2.AssignRequest, context: Context) -> worker_pb2.AssignReply:
        async with one_call(context):
            _time_left_s(context)
            await self._port.assign(codec.role_from_pb(message))
            return worker_pb2.AssignReply()


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1: a worker that drains or stands still serves no request, yet answers its operator."""

    def __init__(self, port: WorkerPort) -> None:
        self._port = port

    async def Check(
        self, message: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = await self._status(message.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, message: health_pb2.HealthCheckRequest, context: Context) -> None:
        told = None
        while True:
            status = await self._status(message.service)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _status(self, service: str) -> int:
        if service in CONTROL_SERVICES:
            return int(health_pb2.HealthCheckResponse.SERVING)
        if service not in REQUEST_SERVICES:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        load = await self._port.status()
        if load.draining or load.stalled_s >= STALLED_AFTER_S:
            return int(health_pb2.HealthCheckResponse.NOT_SERVING)
        return int(health_pb2.HealthCheckResponse.SERVING)


async def _stream(outputs: AsyncGenerator[TokenOutput, None], context: Context) -> None:
    """Write what the port gives; a call that is cancelled, also in a write, closes the generator at once."""
    async with aclosing(outputs):
        async for output in outputs:
            await context.write(codec.output_to_pb(output))


def _time_left_s(context: Context) -> float:
    """The seconds until the call's deadline.

    Raises:
        InvalidRequest: It has none.
        DeadlineExceeded: It has passed.
    """
    time_left_s: float | None = context.time_remaining()
    if time_left_s is None:
        raise InvalidRequest("timeout_s", "the call has no deadline")
    if time_left_s <= 0.0:
        raise DeadlineExceeded("the request's deadline had passed when the worker got it")
    return time_left_s
