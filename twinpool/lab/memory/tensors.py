"""Every tensor of the families that our engine runs: names and shapes as in their checkpoints.

What a rank keeps of each is what ``twinpool.engine.decoder`` takes of it; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from twinpool.core.errors import ConfigError
from twinpool.engine.model_config import ModelConfig
from twinpool.lab.memory.model_fields import ModelFields


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """One tensor; of a cut one, ranks keep parts of its first or last dimension."""

    name: str
    shape: tuple[int, ...]
    rank_size: int | None = None  # what the rank keeps of the dimension that is cut; None: all of it
    cut_dim: int = 0

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def rank_elements(self) -> int:
        """Elements that the rank keeps."""
        if self.rank_size is None:
            return self.num_elements
        return self.num_elements // self.shape[self.cut_dim] * self.rank_size


def list_tensors(fields: ModelFields, *, rank: int = 0, num_ranks: int = 1) -> Sequence[WeightTensor]:
    """List the tensors of a llama, mistral, qwen2 or qwen3 model, and what one rank keeps of each.

    Raises:
        ModelError: A field is missing or does not fit the others.
        ConfigError: Heads and ranks do not divide.
    """
    config = fields.config
    heads, kv_heads, head_dim, model = (
        fields.num_heads,
        fields.kv_heads()[0],
        fields.head_dim(),
        fields.model_dim,
    )
    inner, vocab = config.integer("intermediate_size"), fields.vocab_size
    if heads % num_ranks:
        raise ConfigError("tensor_parallel", f"{num_ranks} ranks do not divide {heads} query heads")
    own_queries = heads // num_ranks * head_dim
    own_keys = max(1, kv_heads // num_ranks) * head_dim
    own_inner, own_ids = (_cut(total, rank=rank, num_ranks=num_ranks) for total in (inner, vocab))
    biased = config.flag("attention_bias", False) and fields.family in ("llama", "qwen3")
    qkv_biased = biased or fields.family == "qwen2"
    mlp_biased = config.flag("mlp_bias", False) and fields.family == "llama"

    def by_output(name: str, rows: int, own: int, *, has_bias: bool) -> Iterator[WeightTensor]:
        yield WeightTensor(name=f"{name}.weight", shape=(rows, model), rank_size=own)
        if has_bias:
            yield WeightTensor(name=f"{name}.bias", shape=(rows,), rank_size=own)

    def by_input(name: str, columns: int, own: int, *, has_bias: bool) -> Iterator[WeightTensor]:
        yield WeightTensor(name=f"{name}.weight", shape=(model, columns), rank_size=own, cut_dim=1)
        if has_bias:
            yield WeightTensor(name=f"{name}.bias", shape=(model,), rank_size=0 if rank else model)

    def tensors() -> Iterator[WeightTensor]:
        yield WeightTensor(name="model.embed_tokens.weight", shape=(vocab, model), rank_size=own_ids)
        for layer in range(fields.num_layers):
            prefix = f"model.layers.{layer}"
            yield WeightTensor(name=f"{prefix}.input_layernorm.weight", shape=(model,))
            attention = f"{prefix}.self_attn"
            yield from by_output(f"{attention}.q_proj", heads * head_dim, own_queries, has_bias=qkv_biased)
            yield from by_output(f"{attention}.k_proj", kv_heads * head_dim, own_keys, has_bias=qkv_biased)
            yield from by_output(f"{attention}.v_proj", kv_heads * head_dim, own_keys, has_bias=qkv_biased)
            yield from by_input(f"{attention}.o_proj", heads * head_dim, own_queries, has_bias=biased)
            if fields.family == "qwen3":
                yield WeightTensor(name=f"{attention}.q_norm.weight", shape=(head_dim,))
                yield WeightTensor(name=f"{attention}.k_norm.weight", shape=(head_dim,))
            yield WeightTensor(name=f"{prefix}.post_attention_layernorm.weight", shape=(model,))
            yield from by_output(f"{prefix}.mlp.gate_proj", inner, own_inner, has_bias=mlp_biased)
            yield from by_output(f"{prefix}.mlp.up_proj", inner, own_inner, has_bias=mlp_biased)
            yield from by_input(f"{prefix}.mlp.down_proj", inner, own_inner, has_bias=mlp_biased)
        yield WeightTensor(name="model.norm.weight", shape=(model,))
        if not config.flag("tie_word_embeddings", False):
            yield WeightTensor(name="lm_head.weight", shape=(vocab, model), rank_size=own_ids)

    return list(tensors())


def are_known(config: ModelConfig) -> bool:
    """Return whether ``list_tensors`` knows a model, which is whether our engine can run it."""
    return (
        config.fields.get("model_type") in ("llama", "mistral", "qwen2", "qwen3")
        and "quantization_config" not in config
        and not isinstance(config.fields.get("num_key_value_heads"), list)
        and not any(name in config for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    )


def _cut(total: int, *, rank: int, num_ranks: int) -> int:
    """Return how much of a dimension a rank keeps, as ``engine.share.cut`` gives it."""
    return total * (rank + 1) // num_ranks - total * rank // num_ranks
