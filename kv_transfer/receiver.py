"""The decode worker's end of all transfers: checks every frame and writes it into its own blocks.

The only writer of received KV.  Knows nothing of transports, of the engine or of who asked; the blocks
are lent to it by ``expect`` and are the lender's again after ``cancel`` or ``on_expired``:

    expect -> open --(all frames)--> whole --(resumed)--> the request's own, until cancel
                |                      |
                |- broken, damaged     |- lease over: on_expired
                `- lease over          `- cancel
                   or cancel

Every method is synchronous but ``wait`` and ``run``, and all run on one event loop: between two of
them nothing is half done, so a frame is either written wholly before ``cancel`` or never.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.config import TransferConfig
from kv_transfer.coverage import Coverage
from kv_transfer.frame import Frame
from twinpool.core.clock import Clock
from twinpool.core.errors import TransferDamaged, TransferError, TransferRefused, TransferTimeout
from twinpool.core.layout import KVLayout
from twinpool.core.ports import KVStore
from twinpool.core.ticket import Endpoint, KVTicket, TransferReport

_REMEMBERED_ENDS = 4096  # ended transfers whose end can still be told to latecomers


@dataclass(slots=True)
class ReceiverCounters:
    """Totals since the start."""

    frames: int = 0  # accepted
    bytes: int = 0  # payload of the accepted frames
    duplicates: int = 0  # frames that brought nothing new; not written again
    checksum_failures: int = 0
    malformed_frames: int = 0  # frames that do not fit the transfer they name
    late_frames: int = 0  # frames for a transfer that has ended here
    refused: int = 0  # frames and waits that name no open transfer of this epoch
    completed: int = 0
    broken: int = 0  # transfers whose sender failed or gave up
    expired: int = 0


class KVReceiver:
    """A table of the transfers that this worker expects; the ``FrameSink`` of its transports.

    Args:
        store: The worker's KV pool.
        clock: Of leases and reports.
        worker_id: Goes into tickets.
        epoch: Of this life of the worker; frames of another one are refused.
        endpoints: Of the worker's transports, best first.
        config: Lease and checksum.

    Attributes:
        counters: Read them.
        on_expired: Set by the lender of the blocks.  Called once with the transfer id when a lease ran
            out, after which nothing is written for it; the lender takes its blocks back.
    """

    def __init__(
        self,
        store: KVStore,
        clock: Clock,
        *,
        worker_id: str,
        epoch: int,
        endpoints: Sequence[Endpoint],
        config: TransferConfig,
    ) -> None:
        self.counters = ReceiverCounters()
        self.on_expired: Callable[[str], None] = lambda transfer_id: None
        self._store = store
        self._clock = clock
        self._worker_id = worker_id
        self._epoch = epoch
        self._endpoints = tuple(endpoints)
        self._config = config
        self._open: dict[str, _Incoming] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Transfers that hold blocks: expected and neither cancelled nor expired."""
        return len(self._open)

    def expect(
        self,
        *,
        request_id: str,
        blocks: Sequence[int],
        num_tokens: int,
        cached_tokens: int = 0,
        timeout_s: float,
    ) -> KVTicket:
        """Open a transfer of tokens ``[cached_tokens, num_tokens)`` into ``blocks``.

        Args:
            request_id: Goes into the ticket.
            blocks: The blocks of the sequence in token order, those of the cached tokens included.
            num_tokens: Tokens whose KV must be there before ``wait`` returns.
            cached_tokens: The first tokens, already there; never written.
            timeout_s: The request's own time; the transfer is over then, whatever its progress.
        """
        layout = self._store.layout
        assert 0 <= cached_tokens <= num_tokens <= len(blocks) * layout.block_tokens
        transfer_id = secrets.token_hex(16)
        incoming = _Incoming(
            layout=layout,
            blocks=tuple(blocks),
            num_tokens=num_tokens,
            cached_tokens=cached_tokens,
            now_s=self._clock.now_s(),
            timeout_s=timeout_s,
        )
        self._open[transfer_id] = incoming
        if cached_tokens == num_tokens:
            self._complete(incoming)
        return KVTicket(
            transfer_id=transfer_id,
            epoch=self._epoch,
            request_id=request_id,
            worker_id=self._worker_id,
            endpoints=self._endpoints,
            num_tokens=num_tokens,
            cached_tokens=cached_tokens,
            lease_s=self._config.lease_s,
        )

    def accept(self, frame: Frame) -> None:
        """Check a frame and write it; see ``FrameSink.accept``.

        Nothing is touched before the frame is known to be whole, of this epoch, of an open transfer
        and within the part of it that is not cached.
        """
        incoming = self._find(frame.transfer_id, frame.epoch)
        if incoming is None:
            self.counters.late_frames += frame.epoch == self._epoch and frame.transfer_id in self._ended
            raise TransferRefused(str(self._refusal(frame.transfer_id, frame.epoch)))
        if incoming.error is not None:
            self.counters.late_frames += 1
            raise TransferRefused(f"the transfer has failed: {incoming.error}")
        self._check_shape(incoming, frame)
        if self._config.checksum and frame.checksum != frame.true_checksum():
            self.counters.checksum_failures += 1
            raise TransferDamaged(f"layer {frame.layer}, token {frame.first_token}: wrong checksum")
        coverage = incoming.coverage[frame.layer]
        if not coverage.num_missing(first_token=frame.first_token, end_token=frame.end_token):
            self.counters.duplicates += 1
            return
        self._store.write(
            frame.payload,
            layer=frame.layer,
            blocks=incoming.blocks,
            first_token=frame.first_token,
            num_tokens=frame.num_tokens,
        )
        coverage.add(first_token=frame.first_token, end_token=frame.end_token)
        self._note_progress(incoming, frame)

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
        if incoming.is_pending:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            incoming.waiters.add(waiter)
            try:
                await waiter
            finally:
                incoming.waiters.discard(waiter)
        if incoming.error is not None:
            raise _fresh(incoming.error)

    def broken(self, transfer_id: str, epoch: int, error: TransferError) -> None:
        """Note that the sender will send no more; see ``FrameSink.broken``.

        The room stays reserved until ``cancel`` or the end of the lease.
        """
        incoming = self._open.get(transfer_id)
        if incoming is not None and epoch == self._epoch and incoming.is_pending:
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

    def _find(self, transfer_id: str, epoch: int) -> _Incoming | None:
        """Return an open transfer of this epoch; ends it first if its time is over."""
        if epoch == self._epoch and transfer_id in self._open:
            self._expire_if_over(transfer_id, self._open[transfer_id], self._clock.now_s())
            return self._open.get(transfer_id)
        return None

    def _refusal(self, transfer_id: str, epoch: int) -> TransferError:
        """Say why there is no such open transfer."""
        self.counters.refused += 1
        if epoch != self._epoch:
            return TransferRefused(f"epoch {epoch} is over, this is {self._epoch}")
        ended = self._ended.get(transfer_id)
        return TransferRefused("no such transfer is expected") if ended is None else _fresh(ended.error)

    def _check_shape(self, incoming: _Incoming, frame: Frame) -> None:
        layout = self._store.layout
        fits = (
            0 <= frame.layer < layout.num_layers
            and frame.num_tokens > 0
            and incoming.cached_tokens <= frame.first_token
            and frame.end_token <= incoming.num_tokens
            and frame.payload.nbytes == frame.num_tokens * layout.layer_token_bytes
        )
        if not fits:
            self.counters.malformed_frames += 1
            raise TransferDamaged(
                f"layer {frame.layer}, tokens {frame.first_token} to {frame.end_token} in "
                f"{frame.payload.nbytes} bytes do not fit into {layout.num_layers} layers of tokens "
                f"{incoming.cached_tokens} to {incoming.num_tokens}, {layout.layer_token_bytes} bytes each"
            )

    def _note_progress(self, incoming: _Incoming, frame: Frame) -> None:
        self.counters.frames += 1
        self.counters.bytes += frame.payload.nbytes
        incoming.num_frames += 1
        incoming.kv_bytes += frame.payload.nbytes
        incoming.progress_s = self._clock.now_s()
        if incoming.first_frame_s is None:
            incoming.first_frame_s = incoming.progress_s - incoming.started_s
        if all(coverage.is_whole for coverage in incoming.coverage):
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


class _Incoming:
    """One transfer that holds blocks."""

    def __init__(
        self,
        *,
        layout: KVLayout,
        blocks: tuple[int, ...],
        num_tokens: int,
        cached_tokens: int,
        now_s: float,
        timeout_s: float,
    ) -> None:
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.cached_tokens = cached_tokens
        self.coverage = [
            Coverage(first_token=cached_tokens, end_token=num_tokens) for _ in range(layout.num_layers)
        ]
        self.started_s = now_s
        self.progress_s = now_s
        self.timeout_at_s = now_s + timeout_s
        self.first_frame_s: float | None = None
        self.complete_s: float | None = None
        self.resumed_s: float | None = None
        self.num_frames = 0
        self.kv_bytes = 0
        self.error: TransferError | None = None
        self.waiters: set[asyncio.Future[None]] = set()

    @property
    def is_pending(self) -> bool:
        """Whether frames are still awaited."""
        return self.complete_s is None and self.error is None

    def end(self, error: TransferError) -> None:
        if self.error is None:
            self.error = _fresh(error)
        self.wake()

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def report(self) -> TransferReport:
        return TransferReport(
            kv_bytes=self.kv_bytes,
            num_frames=self.num_frames,
            cached_tokens=self.cached_tokens,
            first_frame_s=self.first_frame_s,
            complete_s=self.complete_s,
            resumed_s=self.resumed_s,
        )
