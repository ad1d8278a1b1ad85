"""Two workers with a spoiling proxy between them: the decode worker's tickets lead through it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from kv_transfer.config import TransferConfig
from kv_transfer.group import Identity, ReceiverGroup
from tests.kv_transfer.cut_proxy import CutProxy
from tests.kv_transfer.workers import LAYOUT, SECRET, Worker, two_workers
from twinpool.core.ticket import Endpoint


@asynccontextmanager
async def proxied(
    transport_name: str, config: TransferConfig
) -> AsyncIterator[tuple[Worker, Worker, CutProxy]]:
    """Start a prefill and a decode worker, and the proxy that the former reaches the latter through."""
    async with (
        two_workers(transport_name, config) as (prefill, decode),
        CutProxy(decode.transport.endpoint.address) as proxy,
    ):
        identity = Identity(
            worker_id="decode",
            epoch=decode.receiver.epoch,
            layout=LAYOUT,
            ranks=((Endpoint(transport_name, proxy.address),),),
        )
        behind = ReceiverGroup(decode.receiver, identity, secret=SECRET, lease_s=config.lease_s)
        yield prefill, replace(decode, receiving=behind), proxy
