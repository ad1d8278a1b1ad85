"""The receiving half of one channel, the same for every transport that delivers messages in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from kv_transfer.frame import Frame
from kv_transfer.transport import FrameSink
from twinpool.core.errors import TransferDamaged, TransferError

Messages = AsyncGenerator[Sequence[Frame], None]
Grant = Callable[[int], Awaitable[None]]


async def take_in(sink: FrameSink, transfer_id: str, epoch: int, messages: Messages, grant: Grant) -> None:
    """Feed one transfer into ``sink``; return when it is whole.

    However it ends, the sink knows afterwards that nothing more comes from this channel.

    Args:
        sink: The worker's receiver.
        transfer_id: Of the one transfer on this channel.
        epoch: Of the receiver, as the sender knows it.
        messages: The frames of each message; ends when the sender has sent everything, raises
            TransferError when it cannot go on.
        grant: Called with the payload bytes of each message that the sink is done with.

    Raises:
        TransferError: What ended the transfer; nothing of it is touched any more.
    """
    whole = asyncio.ensure_future(sink.wait(transfer_id, epoch))
    feeding = asyncio.ensure_future(_feed(sink, transfer_id, epoch, messages, grant))
    try:
        await asyncio.wait({whole, feeding}, return_when=asyncio.FIRST_COMPLETED)
        if feeding.done() and not whole.done():
            sink.broken(transfer_id, epoch, feeding.result())
        await whole
    finally:
        whole.cancel()
        feeding.cancel()
        sink.broken(transfer_id, epoch, _stopped())
        await asyncio.gather(whole, feeding, return_exceptions=True)


async def _feed(
    sink: FrameSink, transfer_id: str, epoch: int, messages: Messages, grant: Grant
) -> TransferError:
    """Pass on frames until there are no more; return why there are none."""
    try:
        async with aclosing(messages):
            async for frames in messages:
                for frame in frames:
                    if (frame.transfer_id, frame.epoch) != (transfer_id, epoch):
                        raise TransferDamaged(f"a frame of {frame.transfer_id} came on {transfer_id}")
                    sink.accept(frame)
                await grant(sum(frame.payload.nbytes for frame in frames))
    except TransferError as error:
        return error
    return _stopped()


def _stopped() -> TransferError:
    return TransferError("the sender stopped before everything had come")
