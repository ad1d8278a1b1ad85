"""A transport made of pairs: one lane to each peer, made when it is first needed and kept while it is used.

Knows neither how bytes move (``lane.py``) nor how peers are met (``door.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kv_transfer.arrivals import Strangers
from kv_transfer.config import TransferConfig
from kv_transfer.hello import Hello
from kv_transfer.pair.control import Control
from kv_transfer.pair.door import Door
from kv_transfer.pair.lane import Lanes
from kv_transfer.pair.receiving import ReceivingPair
from kv_transfer.pair.sending import NoWay, PairChannel, SendingPair
from kv_transfer.transport import FrameSink
from twinpool.core.errors import TransferError, TransferRefused, TransferTimeout
from twinpool.core.ticket import Endpoint

_MOST_PAIRS = 32  # in each direction: each holds slots, threads, and what its library takes
_BUILD_S = 60.0  # the first use of a library between two machines may take many seconds
_REFUSED_S = 10.0  # a peer that has said why there is no way to it is not asked again

_log = logging.getLogger(__name__)


class PairTransport:
    """Implements ``transport.Transport``.

    Args:
        name: Of the transport.
        config: Credit and deadlines.
        lanes: How bytes move.
        door: How peers are met; closed with the transport.
        most_pairs: Peers in each direction; an idle one makes room for another.
    """

    def __init__(
        self, name: str, config: TransferConfig, lanes: Lanes, door: Door, *, most_pairs: int = _MOST_PAIRS
    ) -> None:
        self.moves_tensors = lanes.moves_tensors
        self._name = name
        self._config = config
        self._lanes = lanes
        self._door = door
        self._most_pairs = most_pairs
        self._to: dict[str, _Building] = {}  # by address, the one used last at the end
        self._from: dict[ReceivingPair, asyncio.Task[None]] = {}  # of no strangers
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = Strangers()
        self._refusals: dict[str, _Refusal] = {}  # by peers that this rank cannot work with, by address
        self._is_closed = False

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self._name, self._door.address)

    def reaches(self, peer: Endpoint) -> bool:
        return self._door.reaches(peer.address)

    async def start(self, sink: FrameSink) -> None:
        async def connected(control: Control) -> None:
            if self._is_closed:
                control.cut()
            else:
                pair = ReceivingPair(control, self._lanes, sink, self._config, self._name)
                self._spawn(self._receive(pair), "pair from a peer")

        await self._door.listen(connected)

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> PairChannel:
        try:
            async with asyncio.timeout(timeout_s):
                kept = self._to.get(peer.address)
                pair = await self._pair_to(peer.address, hello)
                try:
                    return await self._open(pair, hello)
                except TransferError:
                    if kept is None or not kept.is_of(pair) or not pair.is_over:
                        raise
                # It was over before anybody noticed.
                return await self._open(await self._pair_to(peer.address, hello), hello)
        except TimeoutError:
            raise TransferTimeout(f"no answer from {peer.address} in {timeout_s:g} s") from None

    async def close(self) -> None:
        self._is_closed = True
        self._door.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, pair: SendingPair, hello: Hello) -> PairChannel:
        channel = pair.open(hello)
        since_s = asyncio.get_running_loop().time()
        try:
            await channel.met()
        except BaseException:
            pair.unanswered(asyncio.get_running_loop().time() - since_s)
            await channel.abort()
            raise
        return channel

    async def _pair_to(self, address: str, hello: Hello) -> SendingPair:
        """Return the pair with a peer, once it works; one that somebody else waits for is waited for."""
        while True:
            building = self._to.pop(address, None)
            if building is None or building.is_over:
                return await asyncio.shield(self._build(address, hello).pair)
            self._to[address] = building
            with suppress(TransferRefused):  # of the part that the other came with
                return await asyncio.shield(building.pair)

    def _build(self, address: str, hello: Hello) -> _Building:
        if self._is_closed:
            raise TransferError("this worker has closed")
        refusal = self._refusals.get(address)
        if refusal is not None and asyncio.get_running_loop().time() < refusal.until_s:
            raise TransferError(*refusal.error.args)
        self._make_room_to()
        building = self._to[address] = _Building(asyncio.get_running_loop().create_future())
        self._spawn(self._serve(address, hello, building), f"pair to {address}")
        return building

    async def _serve(self, address: str, hello: Hello, building: _Building) -> None:
        """Make a pair and keep it until it is over."""
        pair: SendingPair | None = None
        try:
            async with asyncio.timeout(_BUILD_S):
                pair = self._pair_over(await self._door.connect(address), address)
                await pair.meet(hello)
            building.pair.set_result(pair)
            await pair.run()
        except TimeoutError:
            building.fail(TransferTimeout(f"{address}: no way to it was found in {_BUILD_S:g} s"))
        except NoWay as error:
            self._note_refusal(address, error)
            building.fail(error)
        except TransferError as error:
            building.fail(error)
        finally:
            building.fail(TransferError(f"the pair with {address} was closed"))
            if self._to.get(address) is building:
                del self._to[address]
            if pair is not None:
                await pair.close()

    def _pair_over(self, control: Control, address: str) -> SendingPair:
        try:
            lane = self._lanes.to_peer(control.local_host)
        except BaseException:
            control.cut()
            raise
        return SendingPair(control, lane, address, self._config)

    def _note_refusal(self, address: str, error: TransferError) -> None:
        now_s = asyncio.get_running_loop().time()
        self._refusals = {name: kept for name, kept in self._refusals.items() if now_s < kept.until_s}
        self._refusals[address] = _Refusal(error, now_s + _REFUSED_S)

    def _make_room_to(self) -> None:
        """End the pair that was idle for longest, if there are too many.

        Raises:
            TransferError: All are in use.
        """
        if len(self._to) < self._most_pairs:
            return
        for address, building in self._to.items():
            if building.is_idle:
                del self._to[address]
                building.pair.result().end("it made room for another")
                return
        raise _too_many(len(self._to))

    async def _receive(self, pair: ReceivingPair) -> None:
        task = asyncio.current_task()
        assert task is not None

        def expected(pair: ReceivingPair) -> None:
            self._make_room_from()
            self._strangers.discard(task)
            self._from[pair] = task

        self._strangers.add(task)
        try:
            await pair.run(expected=expected, build_s=_BUILD_S)
        finally:
            self._strangers.discard(task)
            self._from.pop(pair, None)

    def _make_room_from(self) -> None:
        if len(self._from) < self._most_pairs:
            return
        for pair, task in self._from.items():
            if pair.is_idle:
                del self._from[pair]
                task.cancel()
                return
        raise _too_many(len(self._from))

    def _spawn(self, job: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(job, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("%s was ended by a bug", task.get_name(), exc_info=task.exception())


class _Building:
    """A pair that is being made, or was."""

    def __init__(self, pair: asyncio.Future[SendingPair]) -> None:
        self.pair = pair
        pair.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    @property
    def is_over(self) -> bool:
        """Whether another one is needed."""
        if not self.pair.done():
            return False
        return self.pair.exception() is not None or self.pair.result().is_over

    @property
    def is_idle(self) -> bool:
        """Whether it works and nobody uses it."""
        return self.pair.done() and self.pair.exception() is None and self.pair.result().is_idle

    def is_of(self, pair: SendingPair) -> bool:
        """Whether this is how ``pair`` was made."""
        return self.pair.done() and self.pair.exception() is None and self.pair.result() is pair

    def fail(self, error: TransferError) -> None:
        """Tell all who wait that it will not be; ignored if it is."""
        if not self.pair.done():
            self.pair.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What a peer said, for a while."""

    error: TransferError
    until_s: float


def _too_many(number: int) -> TransferError:
    return TransferError(f"{number} peers at once are all that there may be")
