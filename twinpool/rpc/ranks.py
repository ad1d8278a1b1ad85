"""Another rank of a worker, as rank 0 calls it over gRPC, and the server that it answers from.

A call that the rank does not answer in time is the rank's loss, and so is one that does not confirm an end:
nobody knows then what the rank does to its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from twinpool.core.errors import ServingError, WorkerLost
from twinpool.core.rank_port import Expected, RankPort, RankState
from twinpool.core.security import Trust
from twinpool.core.ticket import KVTicket, TransferReport
from twinpool.pb import rank_pb2, rank_pb2_grpc, types_pb2
from twinpool.rpc import codec, rank_codec
from twinpool.rpc.clients import MAX_TIMEOUT_S, WorkerChannel, whole
from twinpool.rpc.door import Door
from twinpool.rpc.limits import MAX_REQUEST_BYTES, server_options
from twinpool.rpc.serving import Context, bind, join_address, one_call

ANSWER_TIMEOUT_S = 10.0  # a loss ends the worker, so a rank that is only busy gets some time


class RankClient:
    """A RankPort over a connection of its own.

    Args:
        address: Of the rank's server.
        name: Of the rank.
        trust: Of this process.
        on_lost: Called with the reason whenever a call finds the rank lost.
    """

    def __init__(self, address: str, *, name: str, trust: Trust, on_lost: Callable[[str], None]) -> None:
        self._channel = WorkerChannel(address, name, trust=trust)
        self._name = name
        self._on_lost = on_lost
        self._stub = rank_pb2_grpc.RankStub(self._channel.grpc)  # type: ignore[no-untyped-call]
        self._timeouts_s: dict[str, float] = {}  # of transfers, until their one long call or their end

    async def expect(self, expected: Expected, *, epoch: int) -> None:
        with self._errors():
            message = rank_codec.expected_to_pb(expected, epoch=epoch)
            await self._stub.Expect(message, timeout=ANSWER_TIMEOUT_S)
        self._timeouts_s[expected.transfer_id] = expected.timeout_s

    async def received(self, transfer_id: str, *, epoch: int) -> None:
        with self._errors():
            message = rank_pb2.TransferName(transfer_id=transfer_id, epoch=epoch)
            await self._stub.Received(message, timeout=self._long_timeout_s(transfer_id))

    async def cancel(self, transfer_id: str) -> TransferReport:
        self._timeouts_s.pop(transfer_id, None)
        with self._errors(is_end=True):
            call = self._stub.Cancel(_named(transfer_id), timeout=ANSWER_TIMEOUT_S)
            return codec.report_from_pb(whole(await call))

    async def begin(self, ticket: KVTicket, *, timeout_s: float) -> None:
        with self._errors():
            message = rank_codec.begin_to_pb(ticket, timeout_s=timeout_s)
            await self._stub.Begin(message, timeout=ANSWER_TIMEOUT_S)
        self._timeouts_s[ticket.transfer_id] = timeout_s

    async def sent(self, transfer_id: str) -> None:
        with self._errors():
            await self._stub.Sent(_named(transfer_id), timeout=self._long_timeout_s(transfer_id))

    async def abort(self, transfer_id: str) -> None:
        self._timeouts_s.pop(transfer_id, None)
        with self._errors(is_end=True):
            await self._stub.Abort(_named(transfer_id), timeout=ANSWER_TIMEOUT_S)

    async def state(self) -> RankState:
        with self._errors():
            call = self._stub.State(rank_pb2.RankStateRequest(), timeout=ANSWER_TIMEOUT_S)
            return rank_codec.state_from_pb(whole(await call))

    async def close(self) -> None:
        """End every call; whoever waits for one gets WorkerLost."""
        await self._channel.close()

    def _long_timeout_s(self, transfer_id: str) -> float:
        """Return when a wait for a transfer is over: a moment after the rank itself gives it up."""
        return min(self._timeouts_s.pop(transfer_id, 0.0) + ANSWER_TIMEOUT_S, MAX_TIMEOUT_S)

    @contextmanager
    def _errors(self, *, is_end: bool = False) -> Iterator[None]:
        """Raise what ended a call as a ServingError.

        Args:
            is_end: The call ends a transfer; whatever it raises, the rank has not confirmed that.
        """
        try:
            with self._channel.control_errors():
                yield
        except WorkerLost as error:
            self._on_lost(error.reason)
            raise
        except ServingError as error:
            if not is_end:
                raise
            self._on_lost(str(error))
            raise WorkerLost(self._name, str(error)) from error


class RankServer:
    """Hosts the transfers of a rank that is not rank 0.

    Args:
        transfers: Called.
        door: Lets rank 0 in.
        host: Address to listen on; a free port is taken.
    """

    def __init__(self, transfers: RankPort, *, door: Door, host: str) -> None:
        self._server = grpc.aio.server(
            interceptors=[door],
            options=server_options(max_receive_bytes=MAX_REQUEST_BYTES, max_send_bytes=MAX_REQUEST_BYTES),
        )
        rank_pb2_grpc.add_RankServicer_to_server(_Rank(transfers), self._server)  # type: ignore[no-untyped-call]
        self._host = host
        self._port = bind(self._server, host, 0, door.trust)

    @property
    def address(self) -> str:
        """What rank 0 connects to."""
        return join_address(self._host, self._port)

    async def start(self) -> None:
        """Answer calls from now on."""
        await self._server.start()

    async def stop(self) -> None:
        """Cancel what runs."""
        await self._server.stop(0)


class _Rank(rank_pb2_grpc.RankServicer):
    def __init__(self, port: RankPort) -> None:
        self._port = port

    async def Expect(self, message: rank_pb2.ExpectRequest, context: Context) -> rank_pb2.RankDone:
        async with one_call(context):
            await self._port.expect(rank_codec.expected_from_pb(message), epoch=message.epoch)
            return rank_pb2.RankDone()

    async def Received(self, message: rank_pb2.TransferName, context: Context) -> rank_pb2.RankDone:
        async with one_call(context):
            await self._port.received(rank_codec.transfer_from_pb(message), epoch=message.epoch)
            return rank_pb2.RankDone()

    async def Cancel(self, message: rank_pb2.TransferName, context: Context) -> types_pb2.TransferReport:
        async with one_call(context):
            return codec.report_to_pb(await self._port.cancel(rank_codec.transfer_from_pb(message)))

    async def Begin(self, message: rank_pb2.BeginRequest, context: Context) -> rank_pb2.RankDone:
        async with one_call(context):
            ticket, timeout_s = rank_codec.begin_from_pb(message)
            await self._port.begin(ticket, timeout_s=timeout_s)
            return rank_pb2.RankDone()

    async def Sent(self, message: rank_pb2.TransferName, context: Context) -> rank_pb2.RankDone:
        async with one_call(context):
            await self._port.sent(rank_codec.transfer_from_pb(message))
            return rank_pb2.RankDone()

    async def Abort(self, message: rank_pb2.TransferName, context: Context) -> rank_pb2.RankDone:
        async with one_call(context):
            await self._port.abort(rank_codec.transfer_from_pb(message))
            return rank_pb2.RankDone()

    async def State(self, _message: rank_pb2.RankStateRequest, context: Context) -> rank_pb2.RankState:
        async with one_call(context):
            return rank_codec.state_to_pb(await self._port.state())


def _named(transfer_id: str) -> Any:
    return rank_pb2.TransferName(transfer_id=transfer_id)
