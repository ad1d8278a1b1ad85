"""Between GPUs by NCCL, and between CPUs by gloo: a process group of torch for each pair of ranks.

Never chosen by itself: its bytes are neither encrypted nor, once two ranks have met, proved to come from
the peer, so it is for networks that only the deployment uses.  Each pair is met, and told everything but
the bytes, over a connection that is encrypted where the deployment has certificates.
"""

from __future__ import annotations

from importlib.util import find_spec

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.pair.door import TcpDoor
from kv_transfer.pair.transport import PairTransport
from twinpool.core.tls import TLSFiles


def unavailable() -> str:
    """Return why this machine cannot use it; empty if it can."""
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch.distributed

    is_built = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    return "" if is_built else "this torch is built without process groups"


def create(config: TransferConfig, hub: Hub, tls: TLSFiles | None) -> PairTransport:
    """Create a worker's transport and bind ``config.listen``, a ``host:port``; port 0 is any free one.

    Raises:
        ConfigError: The address is taken or cannot be bound.
    """
    from kv_transfer.lanes.group import GroupLanes

    return PairTransport("torch_dist", config, GroupLanes(config), TcpDoor(config, tls))
