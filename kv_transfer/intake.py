"""The receiving half of one channel, the same for every transport that delivers messages in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.transport import FrameSink
from twinpool.core.errors import TransferDamaged, TransferError

Messages = AsyncGenerator[Sequence[Frame], None]
Grant = Callable[[int], Awaitable[None]]


async def take_in(sink: FrameSink, hello: Hello, messages: Messages, grant: Grant) -> None:
    """Feed one admitted part into ``sink``; return when it is whole.

    However it ends, the sink knows afterwards that nothing more comes from this channel.

    Args:
        sink: The rank's receiver, which has admitted ``hello``.
        hello: Of the one part on this channel.
        messages: The frames of each message; ends when the sender has sent everything, raises
            TransferError when it cannot go on.
        grant: Called with the payload bytes of each message that the sink is done with.

    Raises:
        TransferError: What ended the transfer; nothing of it is touched any more.
    """
    whole = asyncio.ensure_future(sink.wait_part(hello))
    feeding = asyncio.ensure_future(_feed(sink, hello, messages, grant))
    try:
        await asyncio.wait({whole, feeding}, return_when=asyncio.FIRST_COMPLETED)
        if feeding.done() and not whole.done():
            sink.broken(hello, feeding.result())
        await whole
    finally:
        whole.cancel()
        feeding.cancel()
        sink.broken(hello, _stopped())
        await asyncio.gather(whole, feeding, return_exceptions=True)


async def _feed(sink: FrameSink, hello: Hello, messages: Messages, grant: Grant) -> TransferError:
    """Pass on frames until there are no more; return why there are none."""
    try:
        async with aclosing(messages):
            async for frames in messages:
                if not frames:
                    sink.alive(hello)
                for frame in frames:
                    if not _is_of(frame, hello):
                        raise TransferDamaged(f"a frame of {frame.transfer_id} came on {hello.transfer_id}")
                    sink.accept(frame)
                await grant(sum(frame.payload.nbytes for frame in frames))
    except TransferError as error:
        return error
    return _stopped()


def _is_of(frame: Frame, hello: Hello) -> bool:
    return (frame.transfer_id, frame.epoch, frame.heads) == (hello.transfer_id, hello.epoch, hello.heads)


def _stopped() -> TransferError:
    return TransferError("the sender stopped before everything had come")
