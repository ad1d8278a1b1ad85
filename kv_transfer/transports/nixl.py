"""Between hosts by RDMA, and on one host from process to process: NVIDIA's transfer library, NIXL, over UCX.

Never chosen by itself: UCX reads and writes this process's memory for everybody who reaches its ports (its
``ucp_put_handler`` takes any address), and encrypts nothing, so it is for networks that only the deployment
uses.  Peers meet, and say everything but the bytes, over a connection that is encrypted where the deployment
has certificates.
"""

from __future__ import annotations

from functools import cache

from kv_transfer.addresses import split, where_to_listen
from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.lanes.nixl_agent import NixlAgent, nixl_package
from kv_transfer.pair.door import TcpDoor
from kv_transfer.pair.transport import PairTransport
from twinpool.core.doors import is_loopback
from twinpool.core.errors import ConfigError, TransferError
from twinpool.core.tls import TLSFiles


class NixlTransport(PairTransport):
    """Pairs over NIXL, and UCX with them."""

    def __init__(self, config: TransferConfig, door: TcpDoor, agent: NixlAgent, *, net_devices: str) -> None:
        from kv_transfer.lanes.nixl import NixlLanes

        super().__init__("nixl", config, NixlLanes(config, agent, net_devices=net_devices), door)
        self._agent: NixlAgent | None = agent

    async def close(self) -> None:
        await super().close()
        if self._agent is not None:
            self._agent.close()
            self._agent = None


@cache
def unavailable() -> str:
    """Return why this machine cannot use it; empty if it can.  Starts UCX once to find out."""
    if not nixl_package():
        return "nixl is not installed (pip install twinpool[nixl])"
    try:
        NixlAgent(net_devices="lo").close()
    except (TransferError, ImportError) as error:
        return str(error)
    return ""


def net_devices_of(config: TransferConfig) -> str:
    """Return what UCX may use: the loopback device where only this machine reaches the worker, else all.

    Raises:
        ConfigError: As ``where_to_listen``, or the host is unknown.
    """
    listen, _ = where_to_listen(config)
    return "lo" if is_loopback("transfer.listen", split(listen)[0]) else ""


def create(config: TransferConfig, hub: Hub, tls: TLSFiles | None) -> NixlTransport:
    """Create a worker's transport and bind ``config.listen``, a ``host:port``; port 0 is any free one.

    Where that is an address of this machine alone, UCX opens its ports there too.

    Raises:
        ConfigError: The address is taken or cannot be bound, or UCX cannot start.
    """
    net_devices = net_devices_of(config)
    door = TcpDoor(config, tls)
    try:
        agent = NixlAgent(net_devices=net_devices)
    except TransferError as error:
        door.close()
        raise ConfigError("transfer.transports", f"nixl: {error}") from error
    return NixlTransport(config, door, agent, net_devices=net_devices)
