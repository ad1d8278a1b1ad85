"""Between GPUs of one machine, or two processes on one GPU: the receiver copies from the sender's memory.

Never run on a GPU so far.  Peers are processes of the same user in the same namespaces, met on a socket
that has no file; nothing but the GPU moves the bytes.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.pair.door import LocalDoor
from kv_transfer.pair.transport import PairTransport
from twinpool.core.errors import TransferError
from twinpool.core.tls import TLSFiles

NAME = "cuda_ipc"


def unavailable() -> str:
    """Return why this machine cannot use it; empty if it can."""
    if not Path("/proc/driver/nvidia").exists():
        return "there is no NVIDIA driver"
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "this process uses no GPU"
    from kv_transfer.lanes.cuda_memory import loaded_runtime

    try:
        loaded_runtime()
    except (TransferError, OSError) as error:
        return str(error)
    return ""


def create(config: TransferConfig, hub: Hub, tls: TLSFiles | None) -> PairTransport:
    """Create a worker's transport; ``config.listen`` counts only if it is an address of this transport.

    It needs no encryption: no byte leaves the machine.

    Raises:
        ConfigError: The address is taken.
    """
    import torch

    from kv_transfer.lanes.cuda_memory import CudaMemory, loaded_runtime
    from kv_transfer.lanes.ipc import IpcLanes

    memory = CudaMemory(loaded_runtime(), torch.cuda.current_device())
    door = LocalDoor(config, memory.identity, memory.reaches)
    return PairTransport(NAME, config, IpcLanes(config, memory), door)
