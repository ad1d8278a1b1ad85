"""A frame: one token range of one layer of one part of a transfer, with proof of what it is.

Knows nothing of sockets, of blocks or of who holds them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVPayload

_IDENTITY = struct.Struct("<QIIIII")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What travels: ``[2, num_tokens, num_heads, head_dim]`` elements of one layer, keys first."""

    transfer_id: str
    epoch: int
    first_head: int  # by its number in the model
    num_heads: int
    layer: int
    first_token: int
    num_tokens: int
    checksum: int | None  # of identity and payload; 0 where checksums are off, None if not computed yet
    payload: KVPayload

    @property
    def end_token(self) -> int:
        """The token after the last one."""
        return self.first_token + self.num_tokens

    @property
    def heads(self) -> range:
        """The heads it is of."""
        return range(self.first_head, self.first_head + self.num_heads)

    def copied(self, target: memoryview) -> Frame:
        """Return it with its payload copied to ``target``, which has just the size."""
        self.payload.copy_into(target)
        return replace(self, payload=HostPayload([target]))

    def true_checksum(self) -> int:
        """Compute the checksum over identity and payload, whatever ``checksum`` claims."""
        identity = self.transfer_id.encode() + _IDENTITY.pack(
            self.epoch, self.first_head, self.num_heads, self.layer, self.first_token, self.num_tokens
        )
        return self.payload.checksum(identity)

    def seal(self) -> int:
        """Return the checksum that it has, or its true one if it has none yet.

        Who sends it asks for it once the bytes are at hand, which is cheaper than to read them twice.
        """
        return self.true_checksum() if self.checksum is None else self.checksum

    def sealed(self) -> Frame:
        """Return it with its true checksum."""
        return replace(self, checksum=self.true_checksum())
