"""How the ranks of one worker find each other: the others call rank 0, and stay.

    rank 0   RankMeeting: start -> all_ready -> ... lost: the first of them went -> stop
    others   join_ranks: welcomed -> ready -> ... gone: rank 0 went; or failed: tells it why this one goes

Who stays lives: a process that ends breaks its connections at once, and one that is frozen answers
no keepalive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import grpc.aio

from twinpool.core.doors import check_peer_address
from twinpool.core.errors import ConfigError, InvalidRequest, RankLost
from twinpool.core.rank_port import RankHello, RankReady
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.pb import rank_pb2, rank_pb2_grpc
from twinpool.rpc import rank_codec
from twinpool.rpc.channel import TrustedChannel
from twinpool.rpc.door import Door
from twinpool.rpc.limits import MAX_JOIN_BYTES, channel_options, server_options
from twinpool.rpc.serving import EOF, Context, bind, join_address, one_call
from twinpool.rpc.status import MAX_TEXT_CHARS, error_of

WELCOME_TIMEOUT_S = 30.0  # for rank 0 to answer, on a machine that loads a model at the same time
_HELLO_TIMEOUT_S = 5.0  # a stream that says nothing is closed
_FAREWELL_S = 2.0  # for the reason of a rank's end to reach rank 0


class RankMeeting:
    """Where the other ranks of a worker come.

    Args:
        num_ranks: Of the worker.
        generation: Of the worker.
        group_address: Told to each rank: where all of them compute together.
        door: Lets the ranks in.
        host: Address to listen on; a free port is taken.
    """

    def __init__(self, *, num_ranks: int, generation: int, group_address: str, door: Door, host: str) -> None:
        self._server = grpc.aio.server(
            interceptors=[door],
            options=server_options(max_receive_bytes=MAX_JOIN_BYTES, max_send_bytes=MAX_JOIN_BYTES),
        )
        self._attendance = _Attendance(num_ranks, generation, group_address, door.trust)
        rank_pb2_grpc.add_RanksServicer_to_server(self._attendance, self._server)  # type: ignore[no-untyped-call]
        self._host = host
        self._port = bind(self._server, host, 0, door.trust)

    @property
    def address(self) -> str:
        """What the other ranks are to call."""
        return join_address(self._host, self._port)

    async def start(self) -> None:
        """Take ranks in from now on."""
        await self._server.start()

    async def all_ready(self) -> tuple[RankReady, ...]:
        """Wait until every other rank is ready; return what they say of themselves, in order.

        The caller bounds the wait, or ``lost`` ends it.
        """
        return tuple(await asyncio.gather(*self._attendance.ready.values()))

    async def lost(self) -> RankLost:
        """Wait until the first rank goes, whatever its reason; return that."""
        return await asyncio.shield(self._attendance.lost)

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that are not ready."""
        return tuple(rank for rank, ready in self._attendance.ready.items() if not ready.done())

    async def all_gone(self) -> None:
        """Wait until no rank stays."""
        await self._attendance.nobody.wait()

    async def stop(self) -> None:
        """Let every rank go."""
        await self._server.stop(0)


class _Attendance(rank_pb2_grpc.RanksServicer):
    def __init__(self, num_ranks: int, generation: int, group_address: str, trust: Trust) -> None:
        loop = asyncio.get_running_loop()
        self.ready: dict[int, asyncio.Future[RankReady]] = {
            rank: loop.create_future() for rank in range(1, num_ranks)
        }
        self.lost: asyncio.Future[RankLost] = loop.create_future()
        self._num_ranks = num_ranks
        self._generation = generation
        self._group_address = group_address
        self._trust = trust
        self.nobody = asyncio.Event()
        self.nobody.set()
        self._came: set[int] = set()
        self._num_here = 0

    async def Join(self, _messages: object, context: Context) -> None:
        async with one_call(context):
            rank = self._begin(await _read_hello(context))
            reason = "its process ended, or cannot be reached"
            try:
                await context.write(rank_pb2.RankWelcome(group_address=self._group_address))
                reason = await self._listen(rank, context, reason)
            finally:
                self._end(rank, reason)

    def _begin(self, hello: RankHello) -> int:
        """Take a rank in; each comes once.

        Raises:
            ConfigError: It belongs to another worker or another life, or was here already.
        """
        for name, theirs, ours in (
            ("num_ranks", hello.num_ranks, self._num_ranks),
            ("generation", hello.generation, self._generation),
        ):
            if theirs != ours:
                raise ConfigError(f"rank {hello.rank}", f"{name} is {theirs} there and {ours} on rank 0")
        if hello.rank in self._came:
            raise ConfigError(f"rank {hello.rank}", "it has joined already")
        self._came.add(hello.rank)
        self._num_here += 1
        self.nobody.clear()
        return hello.rank

    def _end(self, rank: int, reason: str) -> None:
        self._num_here -= 1
        if not self._num_here:
            self.nobody.set()
        if not self.lost.done():
            self.lost.set_result(RankLost(f"rank {rank}: {reason}"))

    async def _listen(self, rank: int, context: Context, reason: str) -> str:
        """Hear a rank out; return why it goes."""
        while (message := await context.read()) is not EOF:
            if message.HasField("failure"):
                reason = message.failure.reason[:MAX_TEXT_CHARS]
            elif message.HasField("ready") and not self.ready[rank].done():
                ready = rank_codec.ready_from_pb(message.ready)
                check_peer_address(f"rank {rank}", ready.address, self._trust)
                self.ready[rank].set_result(ready)
            else:
                raise InvalidRequest("message", "a rank is ready once, and fails once")
        return reason


async def _read_hello(context: Context) -> RankHello:
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            message = await context.read()
    except TimeoutError:
        raise InvalidRequest("hello", "no message came in time") from None
    if message is EOF:
        raise InvalidRequest("hello", "no message came")
    return rank_codec.hello_from_pb(message)


class RankStay:
    """The stay of another rank at rank 0; only ``join_ranks`` makes one.

    Attributes:
        group_address: Where the ranks compute together.
    """

    def __init__(self, call: Any, channel: TrustedChannel, group_address: str) -> None:
        self.group_address = group_address
        self._call = call
        self._channel = channel
        self._ending = asyncio.ensure_future(call.read())  # nothing more is ever said

    async def ready(self, ready: RankReady) -> None:
        """Say that this rank can work.

        Raises:
            RankLost: Rank 0 is gone.
        """
        with _errors(self._channel):
            await self._call.write(rank_codec.ready_to_pb(ready))

    async def failed(self, reason: str) -> None:
        """Say why this rank is about to end; a rank 0 that is gone need not know."""
        failure = rank_pb2.RankFailure(reason=reason[:MAX_TEXT_CHARS])
        with suppress(RankLost, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                with _errors(self._channel):
                    await self._call.write(rank_pb2.RankMessage(failure=failure))
                    await self._call.done_writing()
                await asyncio.wait({self._ending})  # rank 0 has read it

    async def gone(self) -> RankLost:
        """Wait until rank 0 goes; return how."""
        await asyncio.wait({self._ending})
        try:
            with _errors(self._channel):
                self._ending.result()
        except (RankLost, ConfigError) as error:
            return RankLost(str(error))
        return RankLost("rank 0 ended")

    async def close(self) -> None:
        """Leave."""
        self._call.cancel()
        await asyncio.gather(self._ending, return_exceptions=True)


@asynccontextmanager
async def join_ranks(
    address: str, hello: RankHello, *, audience: str, trust: Trust
) -> AsyncIterator[RankStay]:
    """Call rank 0 and stay until the block ends.

    Args:
        address: Of its meeting.
        hello: Who calls.
        audience: The name of rank 0.
        trust: Of this process.

    Raises:
        RankLost: It does not answer, or takes nobody in.
        ConfigError: It is another worker's, or does not trust this process.
    """
    options = channel_options(max_receive_bytes=MAX_JOIN_BYTES, max_send_bytes=MAX_JOIN_BYTES)
    async with TrustedChannel(
        address, trust=trust, to=Party.WORKER, audience=audience, options=options
    ) as channel:
        call = rank_pb2_grpc.RanksStub(channel).Join(wait_for_ready=True)  # type: ignore[no-untyped-call]
        try:
            stay = RankStay(call, channel, await _enter(call, channel, hello))
            try:
                yield stay
            finally:
                await stay.close()
        finally:
            call.cancel()


async def _enter(call: Any, channel: TrustedChannel, hello: RankHello) -> str:
    """Say who calls; return where the ranks compute together."""
    try:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            with _errors(channel):
                with suppress(asyncio.InvalidStateError):  # the call is over; the read says why
                    await call.write(rank_codec.hello_to_pb(hello))
                welcome = await call.read()
    except TimeoutError:
        raise RankLost(f"rank 0 did not answer within {WELCOME_TIMEOUT_S:g} s") from None
    if welcome is EOF or welcome is None:
        raise RankLost("rank 0 ended before it answered")
    return str(welcome.group_address)


@contextmanager
def _errors(channel: TrustedChannel) -> Iterator[None]:
    """Raise what ended the call as a ServingError: a refusal as it is, all else as the loss of rank 0."""
    try:
        yield
    except asyncio.InvalidStateError:
        raise RankLost("rank 0 ended") from None
    except grpc.aio.AioRpcError as call_error:
        error = error_of(call_error, worker_id="rank 0", explain=channel.explain)
        raise (error if isinstance(error, ConfigError) else RankLost(f"rank 0 is gone: {error}")) from None
