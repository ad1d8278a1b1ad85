"""Ports of a worker in another process: the same calls, answered over gRPC.

Every call has a deadline, fails fast when the worker cannot be reached, and raises the error that the
worker raised.  A worker that cannot answer is ``WorkerLost``.  Closing a generator or cancelling a call
cancels it on the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from twinpool.core.clock import Clock
from twinpool.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ServingError,
    TransferRefused,
    WorkerLost,
)
from twinpool.core.ports import Role, WorkerAudit, WorkerLoad
from twinpool.core.request import Request, TokenOutput
from twinpool.core.security import Trust
from twinpool.core.tasks import OwnedTasks
from twinpool.core.ticket import KVTicket, TransferReport
from twinpool.core.tls import Party
from twinpool.pb import worker_pb2, worker_pb2_grpc
from twinpool.rpc import codec
from twinpool.rpc.channel import TrustedChannel
from twinpool.rpc.limits import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES, channel_options
from twinpool.rpc.status import error_of

CONTROL_TIMEOUT_S = 5.0  # release, status, audit, assign: quick for a worker that lives
MAX_TIMEOUT_S = 7 * 24 * 3600.0  # gRPC's own arithmetic ends before that of floats

T = TypeVar("T")

_log = logging.getLogger(__name__)


class WorkerChannel:
    """One connection to one worker, shared by its clients; made when the first call needs it.

    Args:
        address: Of the worker's gRPC server.
        worker_id: Who must be there; named in the errors.
        trust: Of this process.
    """

    def __init__(self, address: str, worker_id: str, *, trust: Trust) -> None:
        self.worker_id = worker_id
        self.grpc = TrustedChannel(
            address,
            trust=trust,
            to=Party.WORKER,
            audience=worker_id,
            options=channel_options(max_receive_bytes=MAX_ANSWER_BYTES, max_send_bytes=MAX_REQUEST_BYTES),
        )
        self.tasks = OwnedTasks()  # of the clients; ended with the channel

    async def close(self) -> None:
        """End every call at once: whoever waits for one gets WorkerLost."""
        await self.tasks.close()
        await self.grpc.close()

    @contextmanager
    def control_errors(self) -> Iterator[None]:
        """As ``errors``, for calls whose deadline is ours: no answer in time is a lost worker."""
        try:
            with self.errors():
                yield
        except DeadlineExceeded:
            raise WorkerLost(self.worker_id, "it did not answer in time") from None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise what ended a call as a ServingError."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_of(error, worker_id=self.worker_id, explain=self.grpc.explain) from None
        except grpc.aio.UsageError as error:  # the channel is closed
            raise WorkerLost(self.worker_id, str(error)) from None
        except InvalidRequest as error:  # from the codec: the worker's answer, not the caller's request
            raise InternalError(f"worker {self.worker_id} answered nonsense: {error}") from error
        except asyncio.CancelledError:
            # gRPC cancels the waiting task also when the channel is closed; nobody cancelled us then.
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:
                raise
            raise WorkerLost(self.worker_id, "the connection to it was closed") from None


class PrefillClient:
    """A PrefillPort over a channel."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._stub = worker_pb2_grpc.PrefillStub(channel.grpc)  # type: ignore[no-untyped-call]

    async def prefill(self, request: Request, ticket: KVTicket | None) -> TokenOutput:
        message = worker_pb2.PrefillRequest(
            request=codec.request_to_pb(request),
            ticket=None if ticket is None else codec.ticket_to_pb(ticket),
        )
        with self._channel.errors():
            call = self._stub.Prefill(message, timeout=_timeout_s(request.timeout_s))
            return codec.output_from_pb(whole(await call))


class DecodeClient:
    """A DecodePort over a channel.

    Args:
        channel: To the worker.
        clock: Measures what a reserved request has left when it is resumed.
    """

    def __init__(self, channel: WorkerChannel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._stub = worker_pb2_grpc.DecodeStub(channel.grpc)  # type: ignore[no-untyped-call]
        self._deadlines_s: dict[str, float] = {}  # of reserved requests, by transfer id, until the release

    async def reserve(self, request: Request, *, sender_id: str) -> KVTicket:
        deadline_s = self._clock.now_s() + request.timeout_s
        reserving = asyncio.ensure_future(self._reserve(request, sender_id))
        try:
            ticket = await asyncio.shield(reserving)
        except asyncio.CancelledError:
            # The worker may hold room for us already, under a ticket that only its answer tells.
            self._channel.tasks.start(self._give_back(reserving))
            raise
        self._deadlines_s[ticket.transfer_id] = deadline_s
        return ticket

    async def resume(self, ticket: KVTicket, first: TokenOutput) -> AsyncGenerator[TokenOutput, None]:
        message = worker_pb2.ResumeRequest(ticket=codec.ticket_to_pb(ticket), first=codec.output_to_pb(first))
        deadline_s = self._deadlines_s.get(ticket.transfer_id)
        if deadline_s is None:
            raise TransferRefused(f"transfer {ticket.transfer_id} was not reserved here, or is released")
        timeout_s = _timeout_s(deadline_s - self._clock.now_s())
        async with aclosing(self._stream(self._stub.Resume, message, timeout_s)) as outputs:
            async for output in outputs:
                yield output

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        timeout_s = _timeout_s(request.timeout_s)
        async with aclosing(
            self._stream(self._stub.Generate, codec.request_to_pb(request), timeout_s)
        ) as outputs:
            async for output in outputs:
                yield output

    async def release(self, ticket: KVTicket) -> TransferReport:
        """As the port says; raises WorkerLost when the worker does not answer within CONTROL_TIMEOUT_S."""
        self._deadlines_s.pop(ticket.transfer_id, None)
        with self._channel.control_errors():
            call = self._stub.Release(codec.ticket_to_pb(ticket), timeout=CONTROL_TIMEOUT_S)
            return codec.report_from_pb(whole(await call))

    async def _reserve(self, request: Request, sender_id: str) -> KVTicket:
        message = worker_pb2.ReserveRequest(request=codec.request_to_pb(request), sender_id=sender_id)
        with self._channel.errors():
            call = self._stub.Reserve(message, timeout=_timeout_s(request.timeout_s))
            return codec.ticket_from_pb(whole(await call))

    async def _give_back(self, reserving: asyncio.Future[KVTicket]) -> None:
        try:
            await self.release(await reserving)
        except ServingError as error:
            _log.info("nothing to give back to %s: %s", self._channel.worker_id, error)

    async def _stream(
        self, method: Any, message: Message, timeout_s: float
    ) -> AsyncGenerator[TokenOutput, None]:
        with self._channel.errors():
            call = method(message, timeout=timeout_s)
            try:
                async for answer in call:
                    yield codec.output_from_pb(whole(answer))
            finally:
                call.cancel()  # the abort, if the answer has not ended


class WorkerClient:
    """A WorkerPort over a channel."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._stub = worker_pb2_grpc.WorkerStub(channel.grpc)  # type: ignore[no-untyped-call]

    async def status(self) -> WorkerLoad:
        with self._channel.control_errors():
            call = self._stub.Status(worker_pb2.StatusRequest(), timeout=CONTROL_TIMEOUT_S)
            return codec.load_from_pb(whole(await call))

    async def drain(self, *, timeout_s: float) -> bool:
        with self._channel.control_errors():
            call = self._stub.Drain(
                worker_pb2.DrainRequest(timeout_s=timeout_s),
                timeout=_timeout_s(timeout_s + CONTROL_TIMEOUT_S),
            )
            reply: worker_pb2.DrainReply = whole(await call)
            return reply.empty

    async def audit(self) -> WorkerAudit:
        with self._channel.control_errors():
            call = self._stub.Audit(worker_pb2.AuditRequest(), timeout=CONTROL_TIMEOUT_S)
            return codec.audit_from_pb(whole(await call))

    async def clear_cache(self) -> int:
        with self._channel.control_errors():
            call = self._stub.ClearCache(worker_pb2.ClearCacheRequest(), timeout=CONTROL_TIMEOUT_S)
            return codec.freed_blocks_from_pb(whole(await call))

    async def assign(self, role: Role) -> None:
        with self._channel.control_errors():
            message = worker_pb2.AssignRequest(role=role.value)
            whole(await self._stub.Assign(message, timeout=CONTROL_TIMEOUT_S))


def _timeout_s(time_left_s: float) -> float:
    if time_left_s <= 0.0:
        raise DeadlineExceeded("the request's deadline passed before a worker was asked")
    return min(time_left_s, MAX_TIMEOUT_S)


def whole(answer: T | None) -> T:
    """Return the answer, which gRPC gives as None when its bytes are no message.

    Raises:
        InvalidRequest: They are none.
    """
    if answer is None:
        raise InvalidRequest(None, "the bytes are no message")
    return answer
