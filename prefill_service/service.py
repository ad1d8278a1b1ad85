"""Computes prompts and sends their KV: an engine and the sending end of transfers, made one port.

    begin transfer -> submit -> compute, KV leaves after each layer -> first token -> the last KV leaves
                                                                           |
                                                the call ends here --------'

Who may touch the blocks of a prompt: the engine writes them until the first token, the transfer reads
them until ``wait`` or ``abort`` has returned.  So however a call ends, the transfer is ended before the
engine is told that the blocks are drained; that order stands in ``_give_up`` and ``_see_off`` alone.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress

from kv_transfer.group import OutgoingTransfer, SenderGroup
from twinpool.core.errors import InvalidRequest, ServingError, TransferError, WorkerLost
from twinpool.core.request import Request, TokenOutput
from twinpool.core.tasks import OwnedTasks
from twinpool.core.ticket import KVTicket
from twinpool.engine.loop import EngineLoop, SequenceHandle

_log = logging.getLogger(__name__)


class PrefillService:
    """The PrefillPort of a worker.

    Args:
        loop: Runs the prompts; started and closed by the caller.
        sender: Sends the KV; its transfers are ended by ``close``.
    """

    def __init__(self, loop: EngineLoop, sender: SenderGroup) -> None:
        self._loop = loop
        self._sender = sender
        self._tasks = OwnedTasks()

    @property
    def num_transfers(self) -> int:
        """Transfers that are not over."""
        return self._sender.num_open

    async def prefill(self, request: Request, ticket: KVTicket | None) -> TokenOutput:
        """As the port says; a transfer that fails before the first token is known ends the prompt with it."""
        if ticket is None:
            return await self._prefill_only(request)
        _check_ticket(ticket, request)
        transfer = await self._sender.begin(ticket, timeout_s=request.timeout_s)

        def on_written(layer: int, num_tokens: int) -> None:
            transfer.written(layer, num_tokens, handle.blocks)

        try:
            handle = await self._loop.submit(request, on_written=on_written)
        except BaseException:  # nothing was written, so nothing was read
            await self._tasks.finish(transfer.abort())
            raise
        try:
            first = await _first_output(handle, transfer)
        except BaseException:
            await self._tasks.finish(self._give_up(handle, transfer))
            raise
        if first.finish is None:
            self._tasks.start(self._see_off(handle, transfer))
        else:  # nobody decodes after it
            self._tasks.start(self._give_up(handle, transfer))
        return first

    async def close(self) -> None:
        """End every transfer and wait until the engine has been told."""
        await self._sender.close()
        await self._tasks.wait()

    async def _prefill_only(self, request: Request) -> TokenOutput:
        if request.sampling.max_tokens != len(request.output_ids) + 1:
            raise InvalidRequest(
                "max_tokens",
                f"without a ticket the answer must end with its first token, not after "
                f"{request.sampling.max_tokens - len(request.output_ids)}",
            )
        handle = await self._loop.submit(request)
        async with aclosing(handle.outputs()) as outputs:
            return await anext(outputs)

    async def _see_off(self, handle: SequenceHandle, transfer: OutgoingTransfer) -> None:
        """Wait until the KV has left, or cannot leave any more; then the blocks are the engine's.

        The transfer bounds the wait by the request's time and by the ticket's lease.  A rank that is lost may
        still read, so no block is the engine's again then.
        """
        is_read = False
        try:
            await transfer.wait()
        except TransferError as error:  # the decode worker tells the router
            _log.info("the KV of %s did not arrive: %s", handle.request.request_id, error)
        except WorkerLost as error:
            _log.error("the blocks of %s are lost: %s", handle.request.request_id, error)
            is_read = True
        finally:
            if not is_read:
                with suppress(ServingError):  # the engine is closed, and its blocks are gone with it
                    await self._loop.drained(handle)

    async def _give_up(self, handle: SequenceHandle, transfer: OutgoingTransfer) -> None:
        """End a prompt that nobody waits for, in any phase.

        Raises:
            WorkerLost: A rank is gone; see ``_see_off``.
        """
        await transfer.abort()
        with suppress(ServingError):  # the engine is closed, and its blocks are gone with it
            await self._loop.abort(handle)
            await self._loop.drained(handle)


async def _first_output(handle: SequenceHandle, transfer: OutgoingTransfer) -> TokenOutput:
    """Return the first token, unless the transfer fails before it is known."""
    async with aclosing(handle.outputs()) as outputs:
        computing = asyncio.ensure_future(anext(outputs))
        sending = asyncio.ensure_future(transfer.wait())
        try:
            await asyncio.wait({computing, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not computing.done():
                sending.result()
            return await computing
        finally:
            computing.cancel()
            sending.cancel()
            await asyncio.gather(computing, sending, return_exceptions=True)


def _check_ticket(ticket: KVTicket, request: Request) -> None:
    if ticket.request_id != request.request_id:
        raise InvalidRequest("ticket", f"it is for request {ticket.request_id}")
    if ticket.num_tokens != request.num_tokens:
        raise InvalidRequest(
            "ticket", f"it is for {ticket.num_tokens} tokens, the request has {request.num_tokens}"
        )
