"""What a bare link is: the shortest way to move bytes that a transport is made of, with nothing around it.

One link is one file here, named as the transport that it is compared with, with the functions

    piece_sizes(num_bytes)              what may be moved at once; the best one counts
    async listen(host, size) -> Receiving
    async connect(address, size) -> Sending
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twinpool.lab.kv_bench import bare

LIMIT_S = 60.0  # for any step of a peer
DONE = b"."  # what a receiver answers when it has everything

_HELPERS = ("link", "sockets")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSize:
    """What goes over a link at a time."""

    num_bytes: int  # of one move
    piece_bytes: int  # of one call of the library; the last piece of a move may be smaller

    def pieces(self) -> Sequence[tuple[int, int]]:
        """Return where each piece begins and ends."""
        starts = range(0, self.num_bytes, self.piece_bytes)
        return [(start, min(start + self.piece_bytes, self.num_bytes)) for start in starts]


class Receiving(Protocol):
    """The end that takes moves in until the other one leaves."""

    address: str  # for `connect`

    async def run(self) -> None:
        """Take in one move after the other; return when the other end has left."""
        ...

    async def close(self) -> None: ...


class Sending(Protocol):
    """The end that sends."""

    async def move(self) -> float:
        """Move the bytes once; return the seconds until the other end has said that it has them."""
        ...

    async def close(self) -> None: ...


class BareLink(Protocol):
    """The functions of one file."""

    def piece_sizes(self, num_bytes: int) -> Sequence[int]: ...

    async def listen(self, host: str, size: LinkSize) -> Receiving: ...

    async def connect(self, address: str, size: LinkSize) -> Sending: ...


def bare_link(transport: str) -> BareLink | None:
    """Return the bare link of a transport, if there is one."""
    if transport not in {module.name for module in pkgutil.iter_modules(bare.__path__)} - {*_HELPERS}:
        return None
    link: BareLink = importlib.import_module(f"{bare.__name__}.{transport}")
    return link


def some_bytes(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory that was written, so that no page of it is the kernel's page of zeros."""
    return np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
