"""What a transport is: a way to carry frames from one worker to the sink of another.

A transport moves bytes and nothing else.  However it moves them, each one ends in the receiver's
``FrameSink.accept``, which proves a frame and copies it into the receiver's own blocks; no transport
ever writes into the pool of a peer.

One transport is one file in ``kv_transfer/transports`` with a function ``create(config, hub)``; the name of
the file is its name in the config and in ``Endpoint.transport``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.frame import Frame
from twinpool.core.errors import TransferError
from twinpool.core.ticket import Endpoint


class FrameSink(Protocol):
    """The receiving end of all transports of one worker; all its methods run on one event loop."""

    def accept(self, frame: Frame) -> None:
        """Check a frame and keep its bytes; the frame's memory is free again on return.

        Raises:
            TransferRefused: It names no open transfer of this life of the worker.
            TransferDamaged: It is not what was sent, or does not fit; nothing was touched.
        """
        ...

    async def wait(self, transfer_id: str, epoch: int) -> None:
        """Return when the transfer is whole; raise the TransferError that ended it otherwise."""
        ...

    def broken(self, transfer_id: str, epoch: int, error: TransferError) -> None:
        """Say that no more frames will come; ignored for a transfer that is whole, over or unknown."""
        ...


class Channel(Protocol):
    """The way of one transfer to its receiver.  One task sends."""

    async def send(self, frames: Sequence[Frame]) -> None:
        """Hand over the frames of one message; waits until the receiver grants room for them.

        The payloads are the channel's from then on: nobody changes them.

        Raises:
            TransferError: The receiver ended the transfer, or is gone.
        """
        ...

    async def finish(self) -> None:
        """Say that all was sent; return when the receiver confirmed the whole transfer."""
        ...

    async def ended(self) -> None:
        """Return when the receiver confirmed the whole transfer; raise what ended it otherwise.

        May be awaited beside ``send`` and ``finish``: so a sender that has nothing to send yet learns that
        nobody waits any more.
        """
        ...

    async def abort(self) -> None:
        """Give the transfer up and free everything held for it.  Idempotent; also after ``finish``."""
        ...


class Transport(Protocol):
    """One worker's access to one kind of transport."""

    @property
    def endpoint(self) -> Endpoint:
        """Where peers reach this worker; known from creation on."""
        ...

    async def start(self, sink: FrameSink) -> None:
        """Take frames from peers from now on."""
        ...

    async def open(self, peer: Endpoint, *, transfer_id: str, epoch: int, timeout_s: float) -> Channel:
        """Meet the receiver.

        Raises:
            TransferRefused: The receiver does not expect it, or has been restarted since; may also come
                with the first use of the channel.
            TransferTimeout: No answer within ``timeout_s``.
            TransferError: Nobody is there.
        """
        ...

    async def close(self) -> None:
        """End all channels, in both directions, and free the address.  Idempotent."""
        ...
