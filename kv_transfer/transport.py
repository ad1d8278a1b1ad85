"""What a transport is: a way to carry frames from one worker to the sink of another.

A transport moves bytes and nothing else.  However it moves them, each one ends in the receiver's
``FrameSink.accept``, which proves a frame and copies it into the receiver's own blocks; no transport
ever writes into the pool of a peer.

One transport is one file in ``kv_transfer/transports`` with the functions ``create(config, hub, tls)`` and
``unavailable()``, which says why this machine cannot use it and is empty if it can; the name of the file is
its name in the config and in ``Endpoint.transport``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from twinpool.core.errors import TransferError
from twinpool.core.ticket import Endpoint


class FrameSink(Protocol):
    """The receiving end of all transports of one rank; all its methods run on one event loop."""

    def admit(self, hello: Hello, *, transport: str) -> None:
        """Let a sender bring its part of a transfer; each part once.

        Raises:
            TransferRefused: Nobody expects it, or not from this sender, not now, not again.
        """
        ...

    def expects(self, hello: Hello) -> None:
        """Raise what ``admit`` would raise now; admits nobody.  For ways that take a while to build."""
        ...

    def accept(self, frame: Frame) -> None:
        """Check a frame and keep its bytes; the frame's memory is free again on return.

        Raises:
            TransferRefused: It names no part of an open transfer that was admitted.
            TransferDamaged: It is not what was sent, or does not fit; nothing was touched.
        """
        ...

    def alive(self, hello: Hello) -> None:
        """Note that the sender of an admitted part goes on, although it has nothing to send yet."""
        ...

    async def wait_part(self, hello: Hello) -> None:
        """Return when the part is whole; raise the TransferError that ended its transfer otherwise."""
        ...

    def broken(self, hello: Hello, error: TransferError) -> None:
        """Say that no more frames of an admitted part will come; ignored if it is whole or over."""
        ...


class Channel(Protocol):
    """The way of one part of a transfer to its receiver.  One task sends."""

    async def send(self, frames: Sequence[Frame]) -> None:
        """Hand over the frames of one message; waits until the receiver grants room for them.

        A message without frames is a sign of life.

        The channel may read the payloads until it has ended or ``abort`` has returned; nobody changes them
        before that.

        Raises:
            TransferError: The receiver ended the transfer, or is gone.
        """
        ...

    async def finish(self) -> None:
        """Say that all was sent; return when the receiver confirmed the whole part."""
        ...

    async def ended(self) -> None:
        """Return when the receiver confirmed the whole part; raise what ended it otherwise.

        May be awaited beside ``send`` and ``finish``: so a sender that has nothing to send yet learns that
        nobody waits any more.
        """
        ...

    async def abort(self) -> None:
        """Give the part up and free everything held for it.  Idempotent; also after ``finish``."""
        ...


class Transport(Protocol):
    """One rank's access to one kind of transport.

    Attributes:
        moves_tensors: Payloads are asked for as tensors on their device.
    """

    moves_tensors: bool

    @property
    def endpoint(self) -> Endpoint:
        """Where peers reach this rank; known from creation on."""
        ...

    def reaches(self, peer: Endpoint) -> bool:
        """Return whether a way to ``peer`` can exist, as far as its address tells; asks nobody."""
        ...

    async def start(self, sink: FrameSink) -> None:
        """Take frames from peers from now on."""
        ...

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> Channel:
        """Meet the receiver and be admitted.

        Raises:
            TransferRefused: The receiver does not admit the part, or has been restarted since; may also
                come with the first use of the channel.
            TransferTimeout: No answer within ``timeout_s``.
            TransferError: Nobody is there.
        """
        ...

    async def close(self) -> None:
        """End all channels, in both directions, and free the address.  Idempotent."""
        ...
