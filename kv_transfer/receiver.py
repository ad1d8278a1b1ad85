"""The receiving end of all transfers of one rank: checks every frame and writes it into its own blocks.

The only writer of received KV.  Knows nothing of transports, of the engine or of who asked; the blocks
are lent to it by ``expect`` and are the lender's again after ``cancel`` or ``on_expired``:

    expect -> open --(all parts)--> whole --(resumed)--> the request's own, until cancel
                |                      |
                |- broken, damaged     |- lease over: on_expired
                `- lease over          `- cancel
                   or cancel

A sender is admitted with its part, the heads that it brings: once, and only with the proof that the
ticket gave it.

Every method is synchronous but the waits and ``run``, and all run on one event loop: between two of
them nothing is half done, so a frame is either written wholly before ``cancel`` or never.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.config import TransferConfig
from kv_transfer.coverage import Coverage
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from twinpool.core.clock import Clock
from twinpool.core.errors import TransferDamaged, TransferError, TransferRefused, TransferTimeout
from twinpool.core.layout import COMPACT, DTYPE_BYTES, KVLayout, wire_bytes
from twinpool.core.ports import KVRange, KVStore
from twinpool.core.rank_port import Expected
from twinpool.core.ticket import TransferReport

_REMEMBERED_ENDS = 4096  # ended transfers whose end can still be told to latecomers


@dataclass(slots=True)
class ReceiverCounters:
    """Totals since the start."""

    frames: int = 0  # accepted
    bytes: int = 0  # payload of the accepted frames
    duplicates: int = 0  # frames that brought nothing new; not written again
    signs_of_life: int = (
        0  # messages without frames: the prompt is computed, and there is nothing to send yet
    )
    checksum_failures: int = 0
    malformed_frames: int = 0  # frames that do not fit the transfer they name
    late_frames: int = 0  # frames for a transfer that has ended here
    refused: int = 0  # frames and waits that name no open transfer of this epoch
    unproved: int = 0  # senders that could not prove their right, or came a second time
    completed: int = 0
    broken: int = 0  # transfers whose sender failed or gave up
    expired: int = 0


class KVReceiver:
    """A table of the transfers that this rank expects; the ``FrameSink`` of its transports.

    Args:
        store: The rank's KV pool.
        clock: Of leases and reports.
        epoch: Of this life of the worker; frames of another one are refused.
        config: Lease, checksum and wire formats.
        rank: Senders must mean this one.

    Attributes:
        counters: Read them.
        epoch: Of this life of the worker.
        on_expired: Set by the lender of the blocks.  Called once with the transfer id when a lease ran
            out, after which nothing is written for it; the lender takes its blocks back.
    """

    def __init__(
        self,
        store: KVStore,
        clock: Clock,
        *,
        epoch: int,
        config: TransferConfig,
        rank: int = 0,
    ) -> None:
        self.counters = ReceiverCounters()
        self.on_expired: Callable[[str], None] = lambda transfer_id: None
        self._store = store
        self._clock = clock
        self.epoch = epoch
        self._config = config
        self._rank = rank
        self._wires = _accepted_wires(store.layout, config)
        self._open: dict[str, _Incoming] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Transfers that hold blocks: expected and neither cancelled nor expired."""
        return len(self._open)

    @property
    def num_incomplete(self) -> int:
        """Those of them that are not whole."""
        return sum(incoming.complete_s is None for incoming in self._open.values())

    def expect(self, expected: Expected) -> None:
        """Open a transfer of tokens ``[cached_tokens, num_tokens)`` of all heads of this rank."""
        layout = self._store.layout
        assert expected.transfer_id not in self._open, "a transfer is expected once"
        assert (
            0 <= expected.cached_tokens <= expected.num_tokens <= len(expected.blocks) * layout.block_tokens
        )
        incoming = _Incoming(expected, num_heads=len(self._store.heads), now_s=self._clock.now_s())
        self._open[expected.transfer_id] = incoming
        if expected.cached_tokens == expected.num_tokens:
            self._complete(incoming)

    def admit(self, hello: Hello, *, transport: str) -> None:
        """Let a sender bring its part; see ``FrameSink.admit``.

        What is refused here changes nothing: who cannot prove its right cannot end a transfer either.
        """
        incoming = self._expecting(hello)
        incoming.parts[hello.first_head] = _Part(hello, incoming.expected, self._store.layout.num_layers)
        incoming.transports.add(transport)

    def expects(self, hello: Hello) -> None:
        """Raise if ``admit`` would; see ``FrameSink.expects``."""
        self._expecting(hello)

    def accept(self, frame: Frame) -> None:
        """Check a frame and write it; see ``FrameSink.accept``.

        Nothing is touched before the frame is known to be whole, of this epoch, of an admitted part of an
        open transfer and within what is not cached.
        """
        incoming = self._find(frame.transfer_id, frame.epoch)
        if incoming is None:
            self.counters.late_frames += frame.epoch == self.epoch and frame.transfer_id in self._ended
            raise TransferRefused(str(self._refusal(frame.transfer_id, frame.epoch)))
        if incoming.error is not None:
            self.counters.late_frames += 1
            raise TransferRefused(f"the transfer has failed: {incoming.error}")
        part = incoming.parts.get(frame.first_head)
        if part is None or part.hello.num_heads != frame.num_heads:
            self.counters.refused += 1
            raise TransferRefused(f"no sender of heads {_named(frame.heads)} was admitted")
        self._check_shape(part, frame)
        if self._config.checksum and frame.checksum != frame.true_checksum():
            self.counters.checksum_failures += 1
            raise TransferDamaged(f"layer {frame.layer}, token {frame.first_token}: wrong checksum")
        coverage = part.coverage[frame.layer]
        if not coverage.num_missing(first_token=frame.first_token, end_token=frame.end_token):
            self.counters.duplicates += 1
            return
        place = KVRange(
            layer=frame.layer,
            blocks=incoming.expected.blocks,
            first_token=frame.first_token,
            num_tokens=frame.num_tokens,
            heads=frame.heads,
        )
        self._store.write(frame.payload, place, wire=part.hello.wire)
        coverage.add(first_token=frame.first_token, end_token=frame.end_token)
        self._note_progress(incoming, part, frame)

    async def wait(self, transfer_id: str, epoch: int) -> None:
        """Return when all KV is whole; ends at the latest with the lease.

        Raises:
            TransferTimeout: The lease or the request's time ran out.
            TransferRefused: It was cancelled, is unknown, or is of another life of this worker.
            TransferError: Its sender failed.
        """
        incoming = self._find(transfer_id, epoch)
        if incoming is None:
            raise self._refusal(transfer_id, epoch)
        await incoming.until(lambda: not incoming.is_pending)
        if incoming.error is not None:
            raise _fresh(incoming.error)

    async def wait_part(self, hello: Hello) -> None:
        """Return when all frames of an admitted part are here; see ``FrameSink.wait_part``."""
        incoming = self._find(hello.transfer_id, hello.epoch)
        part = None if incoming is None else incoming.parts.get(hello.first_head)
        if incoming is None or part is None:
            raise self._refusal(hello.transfer_id, hello.epoch)
        await incoming.until(lambda: part.is_whole or incoming.error is not None)
        if not part.is_whole and incoming.error is not None:
            raise _fresh(incoming.error)

    def alive(self, hello: Hello) -> None:
        """Renew the lease: the sender goes on; see ``FrameSink.alive``."""
        incoming = self._find(hello.transfer_id, hello.epoch)
        if incoming is not None and incoming.is_pending:
            self.counters.signs_of_life += 1
            incoming.progress_s = self._clock.now_s()

    def broken(self, hello: Hello, error: TransferError) -> None:
        """Note that the sender of a part will send no more; see ``FrameSink.broken``.

        The room stays reserved until ``cancel`` or the end of the lease.
        """
        incoming = self._open.get(hello.transfer_id)
        part = None if incoming is None else incoming.parts.get(hello.first_head)
        if incoming is None or part is None or part.is_whole or hello.epoch != self.epoch:
            return
        if incoming.is_pending:
            self.counters.broken += 1
            incoming.end(error)

    def resumed(self, transfer_id: str) -> None:
        """Note that the tokens were asked for; a whole transfer has no lease from then on."""
        incoming = self._open.get(transfer_id)
        if incoming is not None and incoming.resumed_s is None:
            incoming.resumed_s = self._clock.now_s() - incoming.started_s

    def report(self, transfer_id: str) -> TransferReport:
        """Return what is known of a transfer, also of one that ended a while ago; empty if unknown."""
        incoming = self._open.get(transfer_id)
        if incoming is not None:
            return incoming.report()
        ended = self._ended.get(transfer_id)
        return TransferReport() if ended is None else ended.report

    def cancel(self, transfer_id: str) -> TransferReport:
        """End a transfer, whole or not; nothing is written for it after the return.

        Who waits for it gets TransferRefused, and so does its sender.  Idempotent; an unknown transfer
        gives an empty report.
        """
        if transfer_id in self._open:
            self._end(transfer_id, TransferRefused(f"transfer {transfer_id} was released"))
        return self.report(transfer_id)

    def sweep(self) -> None:
        """End every transfer whose time is over, and call ``on_expired`` for each."""
        now_s = self._clock.now_s()
        for transfer_id, incoming in list(self._open.items()):
            self._expire_if_over(transfer_id, incoming, now_s)

    async def run(self) -> None:
        """Sweep for ever, often enough that a lease is over within a second of its end."""
        while True:
            self.sweep()
            await asyncio.sleep(min(0.5, self._config.lease_s / 4))

    def _expecting(self, hello: Hello) -> _Incoming:
        """Return the transfer that may have the part of ``hello``, or raise."""
        incoming = self._find(hello.transfer_id, hello.epoch)
        if incoming is None:
            raise self._refusal(hello.transfer_id, hello.epoch)
        problem = self._objection(incoming, hello)
        if problem:
            self.counters.unproved += 1
            raise TransferRefused(problem)
        if incoming.error is not None:
            raise TransferRefused(f"the transfer has failed: {incoming.error}")
        return incoming

    def _find(self, transfer_id: str, epoch: int) -> _Incoming | None:
        """Return an open transfer of this epoch; ends it first if its time is over."""
        if epoch == self.epoch and transfer_id in self._open:
            self._expire_if_over(transfer_id, self._open[transfer_id], self._clock.now_s())
            return self._open.get(transfer_id)
        return None

    def _refusal(self, transfer_id: str, epoch: int) -> TransferError:
        """Say why there is no such open transfer."""
        self.counters.refused += 1
        if epoch != self.epoch:
            return TransferRefused(f"epoch {epoch} is over, this is {self.epoch}")
        ended = self._ended.get(transfer_id)
        return TransferRefused("no such transfer is expected") if ended is None else _fresh(ended.error)

    def _objection(self, incoming: _Incoming, hello: Hello) -> str:
        """Say why a sender is not admitted; empty if it is."""
        if not hello.is_proved_by(incoming.expected.key):
            return "the sender does not hold the ticket"
        if hello.sender_id != incoming.expected.sender_id:
            return f"{hello.sender_id} is not the worker that may send"
        if hello.target_rank != self._rank:
            return f"rank {hello.target_rank} is meant, this is {self._rank}"
        heads = self._store.heads
        if not hello.num_heads or hello.first_head not in heads or hello.heads[-1] not in heads:
            return f"heads {_named(hello.heads)} are not kept here, {_named(heads)} are"
        if hello.wire not in self._wires:
            return f"wire format {hello.wire} is none of {', '.join(self._wires)}"
        taken = {head for part in incoming.parts.values() for head in part.hello.heads}
        if not taken.isdisjoint(hello.heads):
            return f"a sender of heads {_named(hello.heads)} was admitted already"
        return ""

    def _check_shape(self, part: _Part, frame: Frame) -> None:
        layout, expected = self._store.layout, part.expected
        token_bytes = self._num_bytes(part.hello, 1)
        fits = (
            0 <= frame.layer < layout.num_layers
            and frame.num_tokens > 0
            and expected.cached_tokens <= frame.first_token
            and frame.end_token <= expected.num_tokens
            and frame.payload.nbytes == frame.num_tokens * token_bytes
        )
        if not fits:
            self.counters.malformed_frames += 1
            raise TransferDamaged(
                f"layer {frame.layer}, tokens {frame.first_token} to {frame.end_token} in "
                f"{frame.payload.nbytes} bytes do not fit into {layout.num_layers} layers of tokens "
                f"{expected.cached_tokens} to {expected.num_tokens}, {token_bytes} bytes each"
            )

    def _num_bytes(self, hello: Hello, num_tokens: int) -> int:
        return wire_bytes(
            hello.wire,
            num_tokens=num_tokens,
            num_heads=hello.num_heads,
            head_dim=self._store.layout.head_dim,
        )

    def _note_progress(self, incoming: _Incoming, part: _Part, frame: Frame) -> None:
        self.counters.frames += 1
        self.counters.bytes += frame.payload.nbytes
        incoming.num_frames += 1
        incoming.kv_bytes += frame.payload.nbytes
        incoming.progress_s = self._clock.now_s()
        if incoming.first_frame_s is None:
            incoming.first_frame_s = incoming.progress_s - incoming.started_s
        if part.coverage[frame.layer].is_whole:
            part.num_missing_layers -= 1
            if part.is_whole:
                incoming.num_missing_heads -= part.hello.num_heads
                if incoming.num_missing_heads:
                    incoming.wake()
                else:
                    self._complete(incoming)

    def _complete(self, incoming: _Incoming) -> None:
        self.counters.completed += 1
        incoming.complete_s = self._clock.now_s() - incoming.started_s
        incoming.wake()

    def _expire_if_over(self, transfer_id: str, incoming: _Incoming, now_s: float) -> None:
        if incoming.complete_s is not None and incoming.resumed_s is not None:
            return
        if now_s >= incoming.timeout_at_s:
            reason = "the request's time is over"
        elif now_s >= incoming.progress_s + self._config.lease_s:
            reason = f"no progress for {self._config.lease_s:g} s"
        else:
            return
        self.counters.expired += 1
        self._end(transfer_id, TransferTimeout(f"transfer {transfer_id}: {reason}"))
        self.on_expired(transfer_id)

    def _end(self, transfer_id: str, error: TransferError) -> None:
        incoming = self._open.pop(transfer_id)
        incoming.end(error)
        self._ended[transfer_id] = _Ended(_fresh(error), incoming.report())
        if len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)


def _fresh(error: TransferError) -> TransferError:
    """Copy an error without its traceback, whose stack frames would keep payloads alive."""
    return type(error)(*error.args)


@dataclass(frozen=True, slots=True)
class _Ended:
    error: TransferError
    report: TransferReport


class _Part:
    """The heads that one sender brings."""

    def __init__(self, hello: Hello, expected: Expected, num_layers: int) -> None:
        self.hello = hello
        self.expected = expected
        self.coverage = [
            Coverage(first_token=expected.cached_tokens, end_token=expected.num_tokens)
            for _ in range(num_layers)
        ]
        self.num_missing_layers = num_layers

    @property
    def is_whole(self) -> bool:
        return self.num_missing_layers == 0


class _Incoming:
    """One transfer that holds blocks."""

    def __init__(self, expected: Expected, *, num_heads: int, now_s: float) -> None:
        self.expected = expected
        self.parts: dict[int, _Part] = {}  # by their first head
        self.num_missing_heads = num_heads
        self.transports: set[str] = set()
        self.started_s = now_s
        self.progress_s = now_s
        self.timeout_at_s = now_s + expected.timeout_s
        self.first_frame_s: float | None = None
        self.complete_s: float | None = None
        self.resumed_s: float | None = None
        self.num_frames = 0
        self.kv_bytes = 0
        self.error: TransferError | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_pending(self) -> bool:
        """Whether frames are still awaited."""
        return self.complete_s is None and self.error is None

    async def until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for ``is_reached``, which is asked after each ``wake``."""
        while not is_reached():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def end(self, error: TransferError) -> None:
        if self.error is None:
            self.error = _fresh(error)
        self.wake()

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def report(self) -> TransferReport:
        return TransferReport(
            kv_bytes=self.kv_bytes,
            num_frames=self.num_frames,
            cached_tokens=self.expected.cached_tokens,
            first_frame_s=self.first_frame_s,
            complete_s=self.complete_s,
            resumed_s=self.resumed_s,
            transport="+".join(sorted(self.transports)),
        )


def _accepted_wires(layout: KVLayout, config: TransferConfig) -> tuple[str, ...]:
    if config.compact:
        return (COMPACT,)
    return tuple(DTYPE_BYTES) if config.convert_dtypes else (layout.dtype,)


def _named(heads: range) -> str:
    return f"{heads.start} to {heads.stop - 1}" if heads else "none"
