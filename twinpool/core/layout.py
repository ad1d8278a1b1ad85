"""How a worker stores KV, in numbers: what two workers must agree on before they exchange a token."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COMPACT = "int8"  # a wire format only: one int8 per element, one float32 scale per token, side and head
WIRE_FORMATS = (*DTYPE_BYTES, COMPACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of one worker's KV cache, over all its ranks.

    One token of one layer is a key and a value of ``[num_kv_heads, head_dim]`` elements each.  With
    ``tp_size`` ranks every rank keeps some of the heads; with more ranks than heads each head is kept by
    several ranks.

    Raises:
        ConfigError: Heads and ranks do not divide each other.
    """

    num_layers: int
    num_kv_heads: int  # of the whole model, whatever the tensor-parallel size
    head_dim: int
    block_tokens: int  # tokens per block
    dtype: str  # a key of DTYPE_BYTES
    tp_size: int = 1  # ranks of the worker

    def __post_init__(self) -> None:
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise ConfigError(
                "tensor_parallel",
                f"{self.tp_size} ranks and {self.num_kv_heads} KV heads do not divide each other",
            )

    @property
    def heads_per_rank(self) -> int:
        """KV heads that each rank keeps."""
        return max(1, self.num_kv_heads // self.tp_size)

    def rank_heads(self, rank: int) -> range:
        """Return the KV heads that ``rank`` keeps, by their number in the model."""
        assert 0 <= rank < self.tp_size, f"rank {rank} of {self.tp_size}"
        first = rank * self.num_kv_heads // self.tp_size
        return range(first, first + self.heads_per_rank)

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer, each head once."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV, each head once: 2 x layers x kv_heads x head_dim x element size."""
        return self.num_layers * self.layer_token_bytes

    @property
    def rank_block_bytes(self) -> int:
        """Bytes that one block takes on each rank, in all layers."""
        head_bytes = 2 * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.block_tokens * self.num_layers * self.heads_per_rank * head_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens, rounded up."""
        return -(-num_tokens // self.block_tokens)


def wire_bytes(wire: str, *, num_tokens: int, num_heads: int, head_dim: int) -> int:
    """Return the bytes of ``[2, num_tokens, num_heads, head_dim]`` elements in a wire format.

    ``int8`` is ``[2, num_tokens, num_heads, head_dim]`` int8, then ``[2, num_tokens, num_heads]`` float32: an
    element is its int8 times the scale of its token, side and head.
    """
    num_rows = 2 * num_tokens * num_heads
    if wire == COMPACT:
        return num_rows * (head_dim + 4)
    return num_rows * head_dim * DTYPE_BYTES[wire]
