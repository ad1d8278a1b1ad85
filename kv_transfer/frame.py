"""A frame: one token range of one layer of one transfer, with proof of what it is.

Knows nothing of sockets, of blocks or of who holds them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

_IDENTITY = struct.Struct("<QQQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What travels: ``[2, num_tokens, num_kv_heads, head_dim]`` elements of one layer, keys first."""

    transfer_id: str
    epoch: int
    layer: int
    first_token: int
    num_tokens: int
    checksum: int  # of identity and payload; 0 where checksums are off
    payload: memoryview  # of bytes

    @property
    def end_token(self) -> int:
        """The token after the last one."""
        return self.first_token + self.num_tokens

    def true_checksum(self) -> int:
        """Compute XXH3-64 over the identity and the payload, whatever ``checksum`` claims."""
        hasher = xxhash.xxh3_64(self.transfer_id.encode())
        hasher.update(_IDENTITY.pack(self.epoch, self.layer, self.first_token, self.num_tokens))
        hasher.update(self.payload)
        return int(hasher.intdigest())
