"""The ranks of a tensor-parallel worker as the model sees them: what each computes alone, and what together.

Knows tensors and bytes, not what they mean, and not how ranks find each other (``torch_group.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from twinpool.core.errors import ConfigError
from twinpool.core.secret import Secret


class RankGroup(Protocol):
    """The place of one process among the ranks that compute one model together.

    All ranks make the same calls in the same order.  Of one rank, one thread makes them; ``close`` may come
    from any thread.

    Attributes:
        rank: Of this process; rank 0 plans and samples.
        size: How many there are.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, the same bits on each; may overwrite ``tensor``.

        Raises:
            RuntimeError: A rank is gone, or did not come in time; see ``step``.
        """
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return all ranks' tensors, which have one shape, on rank 0, and nothing on the others.

        Raises:
            RuntimeError: As ``all_reduce``.
        """
        ...

    def step(self) -> AbstractContextManager[None]:
        """Enclose the collectives of one step: if anything goes wrong inside, the group is over.

        Raises:
            RankLost: Instead of whatever was raised inside; the other ranks are not left waiting.
        """
        ...

    def send_plan(self, plan: bytes) -> None:
        """Tell the other ranks what to compute; rank 0 only.

        Raises:
            RankLost: One of them is gone, or has not taken it in time.
        """
        ...

    def next_plan(self) -> bytes | None:
        """Wait for rank 0's next plan, for as long as it takes; None once the group was closed.

        Raises:
            RankLost: Rank 0 is gone.
        """
        ...

    def exchange(self, data: bytes) -> tuple[bytes, ...]:
        """Return what each rank brought, by rank; waits as long as others may need to load a model.

        Raises:
            RankLost: A rank is gone, or did not come in time.
        """
        ...

    def minimum(self, value: int) -> int:
        """Return the smallest of all ranks' values: how many blocks all of them have room for, say.

        Raises:
            RankLost: As ``exchange``.
        """
        ...

    def close(self) -> None:
        """Leave; from rank 0 it ends the wait of the others for a plan.  Idempotent."""
        ...


class SingleRank:
    """A rank without others: nothing is sent and nothing is copied."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def send_plan(self, plan: bytes) -> None:
        """Nobody is there to be told."""

    def next_plan(self) -> bytes | None:
        return None

    def exchange(self, data: bytes) -> tuple[bytes, ...]:
        return (data,)

    def minimum(self, value: int) -> int:
        return value

    def close(self) -> None:
        """Nobody is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """What all ranks of a worker are told alike, but for the device."""

    size: int  # of the group
    secret: Secret  # proven to each other
    device: str = "cpu"  # of this rank: gloo on a CPU, NCCL on ``cuda:N``
    step_timeout_s: float = 60.0  # of each wait for the other ranks within a step
    start_timeout_s: float = 600.0  # for all to be there, and to load the model

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("tensor_parallel", f"{self.size} is less than 1")
        for name in ("step_timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"tensor_parallel.{name}", f"{getattr(self, name):g} is not above 0")
