"""Both ends of the transfers of one rank, over all its transports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.receiver import KVReceiver
from kv_transfer.registry import load_transport
from kv_transfer.sender import KVSender
from kv_transfer.transport import Transport
from twinpool.core.clock import Clock
from twinpool.core.ports import KVStore
from twinpool.core.secret import Secret
from twinpool.core.ticket import Endpoint
from twinpool.core.tls import TLSFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """Who a rank is to its peers."""

    worker_id: str
    epoch: int  # of this life of the worker
    secret: Secret = field(default_factory=Secret)  # of the deployment
    tls: TLSFiles | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferEnds:
    """A rank's sender and receiver, and the transports that both use, best first."""

    sender: KVSender
    receiver: KVReceiver
    transports: tuple[Transport, ...]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where peers reach this rank, best first."""
        return tuple(transport.endpoint for transport in self.transports)

    def counters(self) -> Mapping[str, int]:
        """Return the totals of both ends since the start, by name."""
        sent = {f"kv_sent_{name}": value for name, value in asdict(self.sender.counters).items()}
        received = {f"kv_received_{name}": value for name, value in asdict(self.receiver.counters).items()}
        return sent | received

    async def close(self) -> None:
        """End everything that is open, in both directions."""
        await self.sender.close()
        for transport in self.transports:
            await transport.close()


async def start_ends(
    store: KVStore,
    clock: Clock,
    config: TransferConfig,
    identity: RankIdentity,
    *,
    names: Sequence[str],
    hub: Hub | None = None,
) -> TransferEnds:
    """Open the transports called ``names`` and take frames from peers from now on.

    Args:
        store: The rank's KV pool.
        clock: Of leases and deadlines.
        config: Where ``listen`` is ``HOST:PORT`` with a port above 0, the n-th transport listens on PORT + n,
            and those of the next rank on the ports behind them.
        identity: Of the rank.
        names: Of transports, best first.
        hub: Where workers of one process find each other.

    Raises:
        ConfigError: A transport does not exist or cannot listen.
    """
    receiver = KVReceiver(store, clock, epoch=identity.epoch, config=config, rank=identity.rank)
    async with AsyncExitStack() as stack:
        transports = []
        for number, name in enumerate(names):
            own = replace(config, listen=_nth(config.listen, identity.rank * len(names) + number))
            transport = load_transport(name, own, hub, identity.tls)
            stack.push_async_callback(transport.close)
            await transport.start(receiver)
            transports.append(transport)
        sender = KVSender(
            store,
            transports,
            clock,
            config,
            worker_id=identity.worker_id,
            secret=identity.secret,
            rank=identity.rank,
        )
        stack.pop_all()
    return TransferEnds(sender=sender, receiver=receiver, transports=tuple(transports))


def _nth(listen: str, number: int) -> str:
    host, colon, port = listen.rpartition(":")
    return f"{host}:{int(port) + number}" if colon and port.isdecimal() and int(port) else listen
