"""The state that a layer without attention keeps per sequence, from config.json.

Elements of convolutions are those of the k - 1 inputs that are still seen.

Source: InferSim's ``kvcache.get_states_size`` (convolution in the model's dtype, recurrence in float32);
shapes as in transformers 5.24.
"""

from __future__ import annotations

from twinpool.engine.model_config import ModelConfig
from twinpool.lab.memory.layer import LayerState
from twinpool.lab.memory.model_fields import ModelFields


def read_state(fields: ModelFields) -> LayerState:
    """Return the state of the layers that have one; a model has one kind of them.

    Raises:
        ModelError: A size is missing, or the kind is not known.
    """
    config = fields.config
    if fields.family == "kimi_linear":
        return _delta_attention(config)
    if "linear_num_value_heads" in config:
        return _gated_delta_net(config)
    if "lru_width" in config or fields.family == "recurrent_gemma":
        return _recurrent(fields)
    if fields.family in ("minimax", "minimax_text_01", "minimax_m1"):
        return _lightning(fields)
    if _mamba_heads(config) is not None and fields.family != "zamba":  # whose heads share Mamba's channels
        return _mamba2(fields)
    return _mamba(fields)


def read_conv(fields: ModelFields) -> LayerState:
    """Return what a short convolution keeps (LFM2)."""
    width = fields.config.integer("conv_dim", fields.model_dim)
    kernel = fields.config.integer("conv_L_cache")
    return LayerState(conv_elements=width * (kernel - 1), recurrent_elements=0, num_heads=width)


def _mamba(fields: ModelFields) -> LayerState:
    """Mamba: a state per inner channel."""
    inner = _inner(fields)
    state = fields.integer(("mamba_d_state", "state_size", "ssm_state_size"))
    kernel = fields.integer(("mamba_d_conv", "conv_kernel"))
    return LayerState(conv_elements=inner * (kernel - 1), recurrent_elements=inner * state, num_heads=inner)


def _mamba2(fields: ModelFields) -> LayerState:
    """Mamba-2: a state of [head dim, state] per head; the convolution also sees B and C of each group."""
    heads = _mamba_heads(fields.config)
    assert heads is not None
    inner = _inner(fields)
    head_dim = _mamba_head_dim(fields, inner // heads)
    inner = heads * head_dim
    state = fields.integer(("mamba_d_state", "state_size", "ssm_state_size"))
    groups = fields.integer(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1)
    kernel = fields.integer(("mamba_d_conv", "conv_kernel"))
    return LayerState(
        conv_elements=(inner + 2 * groups * state) * (kernel - 1),
        recurrent_elements=inner * state,
        num_heads=heads,
        num_groups=groups,
        group_elements=2 * state * (kernel - 1),
    )


def _gated_delta_net(config: ModelConfig) -> LayerState:
    """Qwen3-Next: a state of [key dim, value dim] per value head."""
    key_heads = config.integer("linear_num_key_heads")
    value_heads = config.integer("linear_num_value_heads")
    key_dim = config.integer("linear_key_head_dim")
    value_dim = config.integer("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return LayerState(
        conv_elements=channels * (config.integer("linear_conv_kernel_dim") - 1),
        recurrent_elements=value_heads * key_dim * value_dim,
        num_heads=key_heads,
    )


def _delta_attention(config: ModelConfig) -> LayerState:
    """Kimi Linear: as above, as many keys as values."""
    part = config.part("linear_attn_config")
    heads = config.integer("linear_num_heads") if part is None else part.integer("num_heads")
    head_dim = config.integer("linear_head_dim") if part is None else part.integer("head_dim")
    kernel = (
        config.integer("linear_conv_kernel_dim") if part is None else part.integer("short_conv_kernel_size")
    )
    return LayerState(
        conv_elements=3 * heads * head_dim * (kernel - 1),
        recurrent_elements=heads * head_dim * head_dim,
        num_heads=heads,
    )


def _lightning(fields: ModelFields) -> LayerState:
    """MiniMax: the sum of keys times values of each head."""
    heads, head_dim = fields.num_heads, fields.head_dim()
    return LayerState(conv_elements=0, recurrent_elements=heads * head_dim * head_dim, num_heads=heads)


def _recurrent(fields: ModelFields) -> LayerState:
    """RecurrentGemma: one number per channel."""
    width = fields.config.integer("lru_width", fields.model_dim)
    kernel = fields.config.integer("conv1d_width", 4)
    return LayerState(conv_elements=width * (kernel - 1), recurrent_elements=width, num_heads=width)


def _inner(fields: ModelFields) -> int:
    """Return the inner channels of a Mamba layer."""
    if fields.family in ("mamba", "falcon_mamba") and "intermediate_size" in fields.config:
        return fields.config.integer("intermediate_size")
    if "mamba_d_ssm" in fields.config:
        return fields.config.integer("mamba_d_ssm")
    return fields.integer(("mamba_expand", "expand"), 2) * fields.model_dim


def _mamba_heads(config: ModelConfig) -> int | None:
    names = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    name = next((name for name in names if name in config), None)
    if name is None and config.fields.get("model_type") == "mamba2":
        name = "num_heads"
    return None if name is None else config.integer(name)


def _mamba_head_dim(fields: ModelFields, default: int) -> int:
    if fields.config.fields.get("mamba_d_head") == "auto":
        return default
    names = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    return fields.integer((*names, "head_dim") if fields.family == "mamba2" else names, default)
