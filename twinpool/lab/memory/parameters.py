"""How many parameters a model of any family has: an estimate from its sizes, where tensors are not known.

Counts matrices of attention, of states and of feed-forward parts, with the experts of mixtures; leaves out
norms and biases, a thousandth of a model.  Knows the families that differ from the common shape by name.
"""

from __future__ import annotations

from twinpool.lab.memory.layer_kind import LayerKind, layer_kinds
from twinpool.lab.memory.layer_state import read_state
from twinpool.lab.memory.model_fields import INNER, ModelFields

# Two matrices in a feed-forward part instead of three; its inner dimension is 4 x hidden_size if unsaid.
_UNGATED = (
    *("opt", "bloom", "gpt2", "gpt_bigcode", "gptj", "gpt_neo", "gpt_neox", "falcon", "mpt", "phi"),
    *("starcoder2", "nemotron"),
)
_TIED = (
    *("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "falcon", "mpt"),
    *("cohere", "cohere2", "mamba", "falcon_mamba", "starcoder2"),
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_INNER = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
# Layers share blocks, adjust their sizes, or embed tokens again.
_UNLIKE = (
    *("zamba", "zamba2", "lfm2", "lfm2_moe", "recurrent_gemma", "nemotron_h"),
    *("gemma3n_text", "gemma4_text"),
)


def estimate_parameters(fields: ModelFields) -> int:
    """Return about how many parameters a model has.

    Raises:
        ModelError: A field that is needed is missing, or the family is unlike all others.
    """
    config = fields.config
    if fields.family in _UNLIKE:
        raise config.error("model_type", f"the parameters of {fields.family} are not estimated; say how many")
    is_tied = config.flag("tie_word_embeddings", fields.family in _TIED)
    total = fields.vocab_size * fields.model_dim * (1 if is_tied else 2)
    kinds = layer_kinds(fields)
    attends = any(kind in (LayerKind.FULL, LayerKind.WINDOW, LayerKind.HYBRID) for kind in kinds)
    kv_heads = fields.kv_heads() if attends else (0,) * len(kinds)
    for layer, (kind, heads) in enumerate(zip(kinds, kv_heads, strict=True)):
        total += _mixer(fields, kind, heads) + _feed_forward(fields, kind, layer)
    return total


def _mixer(fields: ModelFields, kind: LayerKind, kv_heads: int) -> int:
    if kind is LayerKind.NOTHING:
        return 0
    attention = _attention(fields, kv_heads) if kind is not LayerKind.STATE else 0
    return attention + (_state(fields) if kind in (LayerKind.STATE, LayerKind.HYBRID) else 0)


def _attention(fields: ModelFields, kv_heads: int) -> int:
    config, model, heads = fields.config, fields.model_dim, fields.num_heads
    if "kv_lora_rank" in config:
        latent, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
        plain, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
        queries = heads * (plain + rope)
        low = config.integer("q_lora_rank") if "q_lora_rank" in config else 0
        query = low * (model + queries) if low else model * queries
        return query + model * (latent + rope) + latent * heads * (plain + value) + heads * value * model
    head_dim = fields.head_dim()
    gates = 1 if fields.family.startswith(("qwen3_next", "qwen3_5")) else 0  # a gate beside each query
    return model * head_dim * ((2 + gates) * heads + 2 * kv_heads)


def _state(fields: ModelFields) -> int:
    """Return the projections in and out of a layer with a state, and what the state itself is made of."""
    config, model, state = fields.config, fields.model_dim, read_state(fields)
    if "linear_num_value_heads" in config:
        keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
        values = config.integer("linear_num_value_heads") * config.integer("linear_value_head_dim")
        return model * (2 * keys + 3 * values + 2 * config.integer("linear_num_value_heads"))
    if state.conv_elements == 0 or fields.family == "kimi_linear":
        return 4 * model * fields.num_heads * fields.head_dim()
    inner = state.num_heads
    if inner * 64 > state.recurrent_elements:  # Mamba: heads are channels
        per_channel = state.recurrent_elements // inner
        rank = fields.integer(("mamba_dt_rank", "time_step_rank"), -(-model // 16))
        return 3 * model * inner + inner * (2 * rank + 3 * per_channel)
    kernel = fields.integer(("mamba_d_conv", "conv_kernel"))
    channels = state.conv_elements // (kernel - 1)
    size = fields.integer(("mamba_d_state", "state_size", "ssm_state_size"))
    inner = state.recurrent_elements // size
    return model * (channels + 2 * inner + state.num_heads)


def _feed_forward(fields: ModelFields, kind: LayerKind, layer: int) -> int:
    """Return the feed-forward part behind a layer, or the one that is a layer of its own."""
    config, model = fields.config, fields.model_dim
    if fields.family in ("mamba", "mamba2", "falcon_mamba"):
        return 0
    matrices = 2 if fields.family in _UNGATED else 3
    named = next((name for name in _EXPERTS if config.fields.get(name)), None)  # 0 is none
    if named is None or not _is_mixture(fields, layer):
        inner = fields.optional(INNER)
        return matrices * model * (4 * model if inner is None else inner)
    experts, inner = config.integer(named), fields.integer(_EXPERT_INNER)
    shared = config.integer("n_shared_experts") if config.fields.get("n_shared_experts") else 0
    if fields.family == "llama4_text":
        shared = 1
    beside = fields.optional(("shared_expert_intermediate_size",)) or 0
    return matrices * model * (inner * (experts + shared) + beside) + model * experts


def _is_mixture(fields: ModelFields, layer: int) -> bool:
    config = fields.config
    if config.fields.get("first_k_dense_replace"):  # DeepSeek: the first layers are dense
        return layer >= config.integer("first_k_dense_replace")
    if "expert_layer_period" in config:  # Jamba
        return layer % config.integer("expert_layer_period") == (
            config.fields.get("expert_layer_offset") or 0
        )
    step = fields.integer(("decoder_sparse_step", "interleave_moe_layer_step"), 1)
    return (layer + 1) % step == 0
