"""Several processes that compute one model together, by torch's collectives.

    rank 0   rank_links.listen -> lead_group -> ... -> close, which ends the others
    others   join_group -> ... -> next_plan until it is None

Tensors go through a process group of torch: gloo on CPUs, NCCL on GPUs.  It is not the global one, so that
a process may be in several.  All else (addresses, plans, the end) goes through ``RankLinks``, whose peers
have proven who they are.  Torch's own TCPStore is not used on CPUs: unless it is given a socket it listens on
all addresses of a host, and it believes everybody (CVE-2025-47277 came of that).  gloo listens on the address
at which rank 0 sees this rank; it asks nobody for a secret, so ranks on several hosts need a network of
their own, as they do with NCCL.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import GatherOptions, ProcessGroupGloo

from twinpool.core.errors import RankLost
from twinpool.engine.parallel import GroupConfig, RankGroup, SingleRank
from twinpool.engine.rank_links import RankLinks, admit, reach

_END = b""  # instead of a plan


class TorchRankGroup:
    """One rank of several; implements ``RankGroup``.

    Args:
        links: To the other ranks.
        config: What all of them were told.
        rank: Of this process.

    Raises:
        RankLost: A rank went away before all had found each other.
    """

    def __init__(self, links: RankLinks, config: GroupConfig, *, rank: int) -> None:
        self._links = links
        self._config = config
        self._rank = rank
        self._collectives: Any = None  # a torch backend; None once the group is broken
        with self.step():
            make = _gloo if config.device == "cpu" else _nccl
            self._collectives = make(links, config, rank)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._config.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._collectives.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self._rank == 0 else []
        self._collectives.gather([parts] if parts else [], [tensor], GatherOptions()).wait()
        return parts

    @contextmanager
    def step(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # The others cannot know how far this rank came: what they wait for must break, not come late.
            self._break()
            if isinstance(error, RankLost):
                raise
            raise RankLost(f"the step failed on rank {self._rank}: {_reason(error)}") from error

    def send_plan(self, plan: bytes) -> None:
        assert plan != _END
        with self.step():
            self._links.send(plan, timeout_s=self._config.step_timeout_s)

    def next_plan(self) -> bytes | None:
        if self._collectives is None:
            raise RankLost("the group broke in an earlier step")
        with self.step():
            return self._links.receive(timeout_s=None) or None

    def exchange(self, data: bytes) -> tuple[bytes, ...]:
        with self.step():
            return self._links.exchange(data, timeout_s=self._config.start_timeout_s)

    def minimum(self, value: int) -> int:
        return min(int(brought) for brought in self.exchange(str(value).encode()))

    def close(self) -> None:
        self._links.close(_END if self._rank == 0 else None)

    def _break(self) -> None:
        """Leave without a word; whoever waits for this rank is told by the system."""
        self._links.close()
        self._collectives = None


def lead_group(listener: socket.socket, config: GroupConfig) -> RankGroup:
    """Wait as rank 0 until all others have joined; closes ``listener``.

    Args:
        listener: From ``rank_links.listen``; the others were told its ``address_of``.
        config: The same as theirs, but for the device.

    Raises:
        RankLost: Some did not come in time, or are gone again.
    """
    if config.size == 1:
        listener.close()
        return SingleRank()
    links = admit(listener, size=config.size, secret=config.secret, timeout_s=config.start_timeout_s)
    return TorchRankGroup(links, config, rank=0)


def join_group(address: str, config: GroupConfig, *, rank: int) -> RankGroup:
    """Join as another rank the group that is led at ``address``.

    Raises:
        RankLost: Rank 0 does not answer in time, or a rank is gone again.
        Untrusted: It is not the rank 0 that this rank belongs to.
    """
    assert 0 < rank < config.size, f"rank {rank} of {config.size}"
    links = reach(
        address, rank=rank, size=config.size, secret=config.secret, timeout_s=config.start_timeout_s
    )
    return TorchRankGroup(links, config, rank=rank)


def _reason(error: Exception) -> str:
    """Return what an error says, without the source line and the advice that gloo adds."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0] or type(error).__name__


class _ExchangeStore(Store):
    """Where gloo leaves its address and looks for those of the others.

    All ranks do so at the same time.  So one exchange, when the first foreign key is asked for, brings every
    rank's keys to every rank, and no server is needed.
    """

    def __init__(self, links: RankLinks, *, timeout_s: float) -> None:
        super().__init__()
        self._links = links
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._values[key] = value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if all(key in self._values for key in keys):
            return
        own = json.dumps({key: value.hex() for key, value in self._values.items()})
        for data in self._links.exchange(own.encode(), timeout_s=self._timeout_s):
            self._values |= {key: bytes.fromhex(value) for key, value in json.loads(data).items()}
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise RankLost(f"no rank left {', '.join(missing)}")


def _gloo(links: RankLinks, config: GroupConfig, rank: int) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=links.host)]
    options._timeout = timedelta(seconds=config.step_timeout_s)
    options._threads = 1  # one collective runs at a time
    return ProcessGroupGloo(
        _ExchangeStore(links, timeout_s=config.step_timeout_s), rank, config.size, options
    )


def _nccl(links: RankLinks, config: GroupConfig, rank: int) -> Any:
    """Never run by our tests, which have at most one GPU: written by torch's documentation.

    A collective that does not end in time ends the process, by NCCL's watchdog.
    """
    from torch.distributed import ProcessGroupNCCL

    torch.cuda.set_device(config.device)
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=config.step_timeout_s)
    store = PrefixStore("ranks", tcp_store(links, timeout_s=config.step_timeout_s))
    return ProcessGroupNCCL(store, rank, config.size, options)


def tcp_store(links: RankLinks, *, timeout_s: float) -> TCPStore:
    """Return torch's own store, kept by rank 0 at its address only; all ranks call it.

    NCCL looks into its store as long as it lives, from threads of its own, which rules ours out.
    """
    is_kept_here = links.rank == 0
    listener = socket.create_server((links.host, 0)) if is_kept_here else None
    own = json.dumps([links.host, listener.getsockname()[1]] if listener else None)
    host, port = json.loads(links.exchange(own.encode(), timeout_s=timeout_s)[0])
    return TCPStore(
        host,
        port,
        is_master=is_kept_here,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
