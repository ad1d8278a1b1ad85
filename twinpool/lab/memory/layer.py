"""What one layer keeps of a sequence: KV of its tokens, a state of fixed size, both, or nothing.

Knows numbers of the whole model; what of them a rank keeps is asked with the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.errors import ConfigError
from twinpool.lab.memory.cache_format import CacheFormat

RECURRENT_BYTES = 4  # of an element of a recurrent state, which engines keep in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """KV that grows with the tokens."""

    num_heads: int  # MQA: 1; MLA: 1, a latent that all query heads use
    rows: tuple[int, ...]  # elements of what a head keeps of a token: (key, value), or (latent with rope,)
    window: int | None = None  # tokens that a token sees, itself included; None: all

    def rank_heads(self, num_ranks: int) -> int:
        """Return the heads that each rank keeps: with more ranks than heads several keep the same one.

        Raises:
            ConfigError: Heads and ranks do not divide each other.

        Source:
            ``KVLayout.heads_per_rank``; the same rule in vLLM (``get_num_kv_heads``) and NVIDIA's
            aiconfigurator.
        """
        if self.num_heads % num_ranks and num_ranks % self.num_heads:
            raise ConfigError(
                "tensor_parallel",
                f"{num_ranks} ranks and {self.num_heads} KV heads do not divide each other",
            )
        return max(1, self.num_heads // num_ranks)

    def token_bytes(self, form: CacheFormat, *, num_ranks: int = 1) -> int:
        """Return what one token takes on each rank."""
        return self.rank_heads(num_ranks) * sum(form.row_bytes(row) for row in self.rows)

    def held_tokens(self, num_tokens: int, *, block_tokens: int) -> int:
        """Return for how many tokens there is room while a sequence has ``num_tokens``, in whole blocks.

        A window lies over one block more than it fills, unless blocks are single tokens.
        """
        blocks = -(-num_tokens // block_tokens)
        if self.window is not None:
            blocks = min(blocks, -(-(self.window - 1) // block_tokens) + 1)
        return blocks * block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """A state per sequence, whatever its length: of state-space, linear and short-convolution layers."""

    conv_elements: int  # inputs that a causal convolution has yet to see again, in the dtype of the model
    recurrent_elements: int  # float32
    num_heads: int  # of whatever ranks share: heads or channels
    num_groups: int = 1  # of heads, which share a B and a C (Mamba-2)
    group_elements: int = 0  # of conv_elements, those of the B and the C of one group

    def sequence_bytes(self, *, dtype_bytes: int, num_ranks: int = 1) -> int:
        """Return what one sequence takes on each rank: a share of the heads, and the groups of these.

        Raises:
            ConfigError: The ranks do not divide the heads, or ranks and groups do not divide each other.

        Source:
            With more ranks than groups several keep the same one, as in vLLM
            (``MambaStateShapeCalculator.mamba2_state_shape``) and SGLang.
        """
        if self.num_heads % num_ranks:
            raise ConfigError("tensor_parallel", f"{num_ranks} ranks do not divide {self.num_heads} states")
        if self.group_elements and self.num_groups % num_ranks and num_ranks % self.num_groups:
            raise ConfigError(
                "tensor_parallel",
                f"{num_ranks} ranks and {self.num_groups} groups of states do not divide each other",
            )
        of_heads = self.conv_elements - self.num_groups * self.group_elements
        shared = of_heads * dtype_bytes + self.recurrent_elements * RECURRENT_BYTES
        groups = max(1, self.num_groups // num_ranks) * self.group_elements
        return -(-shared // num_ranks) + groups * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer; one without both keeps nothing, as a feed-forward layer or one that reads another's KV."""

    kv: LayerKV | None = None
    state: LayerState | None = None
