"""Makes the ports of a worker in another process; the one place where the router names its wire."""

from __future__ import annotations

from collections.abc import Callable

from router.workers import WorkerPorts
from twinpool.core.clock import Clock
from twinpool.core.ports import WorkerInfo
from twinpool.core.security import Trust
from twinpool.rpc.clients import DecodeClient, PrefillClient, WorkerChannel, WorkerClient


def connect_over_grpc(clock: Clock, trust: Trust) -> Callable[[WorkerInfo], WorkerPorts]:
    """Return what a WorkerPool needs to reach workers at the addresses they joined with.

    Args:
        clock: Measures what a reserved request has left when it is resumed.
        trust: Of the router.
    """

    def connect(info: WorkerInfo) -> WorkerPorts:
        channel = WorkerChannel(info.address, info.worker_id, trust=trust)
        return WorkerPorts(
            prefill=PrefillClient(channel),
            decode=DecodeClient(channel, clock),
            worker=WorkerClient(channel),
            connection=channel,
        )

    return connect
