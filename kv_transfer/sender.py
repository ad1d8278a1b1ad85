"""The prefill worker's end of all transfers: begins them and counts how they end.

Knows neither how KV travels (see ``transport``) nor when it is computed (see ``outgoing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.config import TransferConfig
from kv_transfer.outgoing import OutgoingTransfer, TransferEnd
from kv_transfer.transport import Transport
from twinpool.core.clock import Clock
from twinpool.core.errors import TransferError
from twinpool.core.ports import KVStore
from twinpool.core.ticket import KVTicket


@dataclass(slots=True)
class SenderCounters:
    """Totals over the transfers that ended since the start."""

    frames: int = 0  # handed to a transport
    bytes: int = 0  # payload of those frames
    confirmed: int = 0
    failed: int = 0
    aborted: int = 0


class KVSender:
    """Starts transfers out of one worker's store.

    Args:
        store: The worker's KV pool; only read.
        transports: Those of this worker; a ticket's best endpoint that one of them speaks is used.
        clock: Of deadlines.
        config: Message size, checksum and connect timeout.
    """

    def __init__(
        self, store: KVStore, transports: Sequence[Transport], clock: Clock, config: TransferConfig
    ) -> None:
        self.counters = SenderCounters()
        self._store = store
        self._transports = {transport.endpoint.transport: transport for transport in transports}
        self._clock = clock
        self._config = config
        self._open: set[OutgoingTransfer] = set()

    @property
    def num_open(self) -> int:
        """Transfers that are neither confirmed nor failed nor aborted."""
        return len(self._open)

    def begin(self, ticket: KVTicket, *, timeout_s: float) -> OutgoingTransfer:
        """Start the transfer that a ticket allows; connects at once, in the background.

        Args:
            ticket: Of the decode worker that waits.
            timeout_s: The transfer fails when it is not confirmed by then.

        Raises:
            TransferError: The two workers have no transport in common.
        """
        for endpoint in ticket.endpoints:
            transport = self._transports.get(endpoint.transport)
            if transport is None:
                continue
            transfer = OutgoingTransfer(
                ticket,
                partial(transport.open, endpoint, transfer_id=ticket.transfer_id, epoch=ticket.epoch),
                store=self._store,
                clock=self._clock,
                config=self._config,
                timeout_s=timeout_s,
                on_end=self._note_end,
            )
            self._open.add(transfer)
            return transfer
        theirs = ", ".join(endpoint.transport for endpoint in ticket.endpoints) or "none"
        ours = ", ".join(self._transports) or "none"
        raise TransferError(f"no transport in common: {ticket.worker_id} has {theirs}, this worker {ours}")

    async def close(self) -> None:
        """Abort every open transfer."""
        for transfer in list(self._open):
            await transfer.abort()

    def _note_end(self, transfer: OutgoingTransfer, end: TransferEnd) -> None:
        self._open.discard(transfer)
        self.counters.frames += transfer.num_frames
        self.counters.bytes += transfer.num_bytes
        match end:
            case TransferEnd.CONFIRMED:
                self.counters.confirmed += 1
            case TransferEnd.FAILED:
                self.counters.failed += 1
            case TransferEnd.ABORTED:
                self.counters.aborted += 1
