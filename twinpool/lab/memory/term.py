"""One term of a worker's memory, and how far to believe the number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a number is."""

    EXACT = "exact"  # these bytes and no others
    BOUND = "bound"  # no more than these
    ESTIMATE = "estimate"  # about these


class TermName(StrEnum):
    """The terms of a worker's memory."""

    WEIGHTS = "weights"
    CACHE = "KV cache"
    ACTIVATIONS = "activations"
    STAGING = "transfer staging"
    PEERS = "per-peer buffers"
    RESERVE = "reserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Bytes on each rank; on the one that needs most, where they differ."""

    name: TermName
    num_bytes: int
    kind: Kind
    source: str  # of the formula, or what it is made of
