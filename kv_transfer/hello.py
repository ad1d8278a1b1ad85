"""The first thing a sender says: which part of which transfer it brings, and proof that it may."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, replace

from twinpool.core.secret import sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """One part of a transfer: the heads that one rank sends to another, of all its layers and tokens."""

    transfer_id: str
    epoch: int
    sender_id: str  # the worker
    source_rank: int
    target_rank: int
    first_head: int  # by its number in the model
    num_heads: int
    wire: str  # format of all payloads
    proof: bytes = b""  # HMAC of everything above, keyed by the signature of the ticket

    @property
    def heads(self) -> range:
        """The heads of the part."""
        return range(self.first_head, self.first_head + self.num_heads)

    def proved(self, key: bytes) -> Hello:
        """Return it with the proof that only a holder of ``key`` can give; the key does not travel here."""
        return replace(self, proof=self._sign(key))

    def is_proved_by(self, key: bytes) -> bool:
        """Return whether whoever said this holds ``key``."""
        return hmac.compare_digest(self.proof, self._sign(key))

    def _sign(self, key: bytes) -> bytes:
        return sign(
            key,
            "hello",
            self.transfer_id,
            self.epoch,
            self.sender_id,
            self.source_rank,
            self.target_rank,
            self.first_head,
            self.num_heads,
            self.wire,
        )
