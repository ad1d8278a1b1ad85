"""How a worker stores KV, in numbers: what two workers must agree on before they exchange a block."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of one worker's KV cache.

    One token of one layer is a key and a value of ``[num_kv_heads, head_dim]`` elements each.
    """

    num_layers: int
    num_kv_heads: int  # of the whole model, whatever the tensor-parallel size
    head_dim: int
    block_tokens: int  # tokens per block
    dtype: str  # a key of DTYPE_BYTES

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers: 2 x layers x kv_heads x head_dim x element size."""
        return self.num_layers * self.layer_token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.block_tokens * self.token_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens, rounded up."""
        return -(-num_tokens // self.block_tokens)
