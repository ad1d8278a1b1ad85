"""Which kind each layer of a model is; config.json says it in a dozen ways.

Knows names and patterns; does not know what a layer of a kind keeps.

Source: the configuration files of transformers 5.24, whose ``layer_types`` these kinds equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from twinpool.lab.memory.model_fields import ModelFields


class LayerKind(StrEnum):
    """What a layer does with the tokens before."""

    FULL = "full_attention"
    WINDOW = "sliding_attention"
    STATE = "linear_attention"  # state-space, linear attention, gated delta net, recurrent
    CONV = "conv"  # a short convolution
    HYBRID = "hybrid"  # attention and state side by side
    NOTHING = "mlp"


_NAMES: Mapping[str, LayerKind] = MappingProxyType(
    {
        "full_attention": LayerKind.FULL,
        "attention": LayerKind.FULL,
        "global": LayerKind.FULL,
        "local": LayerKind.WINDOW,
        "indexed_attention": LayerKind.FULL,
        "sliding_attention": LayerKind.WINDOW,
        "chunked_attention": LayerKind.WINDOW,
        "linear_attention": LayerKind.STATE,
        "mamba": LayerKind.STATE,
        "recurrent": LayerKind.STATE,
        "conv": LayerKind.CONV,
        "hybrid": LayerKind.HYBRID,
        "mlp": LayerKind.NOTHING,
        "moe": LayerKind.NOTHING,
    }
)
_LETTERS: Mapping[str, LayerKind] = MappingProxyType(
    {"M": LayerKind.STATE, "*": LayerKind.FULL, "-": LayerKind.NOTHING, "E": LayerKind.NOTHING}
)
# Every n-th layer sees everything, the others a window; where the config does not say n.
_FULL_EVERY: Mapping[str, int] = MappingProxyType(
    {
        "gemma2": 2,
        "gemma3_text": 6,
        "gemma3n_text": 5,
        "gemma4_text": 6,
        "cohere2": 4,
        "exaone4": 4,
        "olmo3": 4,
        "gpt_oss": 2,
        "llama4_text": 4,
    }
)
_ONLY_STATES = ("mamba", "mamba2", "falcon_mamba")
_HAS_STATES = (
    *("mamba_d_state", "ssm_state_size", "state_size", "ssm_cfg", "lru_width", "rwkv_version"),
    *("proj_low_rank_dim", "decay_low_rank_dim", "expand_k", "expand_v", "expand_ratio"),
)
# Families without KV whose states are not read: RWKV, xLSTM, and those of flash-linear-attention.
_STATES_UNREAD = (
    *("rwkv", "rwkv5", "rwkv6", "rwkv7", "retnet", "xlstm", "gla", "gsa", "delta_net", "gated_deltanet"),
    *("hgrn", "hgrn2", "linear_attn", "lightnet", "kda", "comba", "abc", "samba"),
)
# Each says which layers have a window, or no KV, in a way that is not read.
_UNREAD = ("attention_types", "global_attn_every_n_layers", "layer_group_size", "local_attention")
_WINDOWS_MUST_BE_ON = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")


def layer_kinds(fields: ModelFields) -> tuple[LayerKind, ...]:
    """Return the kind of each layer.

    Raises:
        ModelError: A field names a kind that is not known, or does not fit the layers.
    """
    kinds = (
        _named(fields, "layer_types")
        or _named(fields, "layers_block_type")
        or _named(fields, "attention_layers")
        or _lettered(fields)
        or _cycled(fields)
        or _flagged(fields)
        or _placed(fields)
        or _only_states(fields)
        or _windowed(fields)
    )
    layers = fields.num_layers
    if len(kinds) != layers:
        raise fields.error("num_hidden_layers", f"{layers} layers, but {len(kinds)} are described")
    return kinds


def window_of(fields: ModelFields) -> int:
    """Return how many tokens a windowed layer sees.

    Raises:
        ModelError: The config does not say.
    """
    return fields.integer(("sliding_window", "attention_window_size", "attention_chunk_size", "window_size"))


def _named(fields: ModelFields, name: str) -> tuple[LayerKind, ...]:
    names = fields.config.texts(name)
    for index, kind in enumerate(names):
        if kind not in _NAMES:
            raise fields.error(f"{name}[{index}]", f"{kind!r} is none of {', '.join(sorted(_NAMES))}")
    return tuple(_NAMES[kind] for kind in names)


def _lettered(fields: ModelFields) -> tuple[LayerKind, ...]:
    """Read Nemotron-H's ``M-M*-``."""
    pattern = fields.config.text("hybrid_override_pattern", "")
    for letter in pattern:
        if letter not in _LETTERS:
            raise fields.error("hybrid_override_pattern", f"{letter!r} is none of {' '.join(_LETTERS)}")
    return tuple(_LETTERS[letter] for letter in pattern)


def _cycled(fields: ModelFields) -> tuple[LayerKind, ...]:
    """Read RecurrentGemma's block types, which repeat; its attention has a window."""
    cycle = _named(fields, "block_types")
    local = {LayerKind.FULL: LayerKind.WINDOW}
    return tuple(
        local.get(kind, kind)
        for kind in (cycle[layer % len(cycle)] for layer in range(fields.num_layers if cycle else 0))
    )


def _flagged(fields: ModelFields) -> tuple[LayerKind, ...]:
    """Read MiMo's pattern: 1 is a layer with a window."""
    flags = fields.numbers("hybrid_layer_pattern")
    return tuple(LayerKind.WINDOW if flag else LayerKind.FULL for flag in flags)


def _placed(fields: ModelFields) -> tuple[LayerKind, ...]:
    """Read where the full layers of a hybrid are; the others have a state."""
    config, layers = fields.config, range(fields.num_layers)
    attends, other = LayerKind.FULL, LayerKind.STATE
    if fields.family == "zamba":  # has a state in those that attend too; counts them from the third on
        full, attends = [2, *(layer + 3 for layer in _every(fields, 6, 4))], LayerKind.HYBRID
    elif "attn_layer_period" in config:  # Jamba
        full = _every(fields, None, 0)
    elif "full_attention_interval" in config:  # Qwen3-Next
        interval = config.integer("full_attention_interval")
        full = [layer for layer in layers if (layer + 1) % interval == 0]
    elif "attn_layer_indices" in config:  # Bamba
        full = list(fields.numbers("attn_layer_indices"))
    elif "attn_type_list" in config:  # MiniMax: 1 is softmax attention
        full = [layer for layer, kind in enumerate(fields.numbers("attn_type_list")) if kind]
    elif "full_attn_idxs" in config:  # LFM2
        full, other = list(fields.numbers("full_attn_idxs")), LayerKind.CONV
    elif (linear := config.part("linear_attn_config")) is not None:  # Kimi Linear, which counts from 1
        full = [layer - 1 for layer in ModelFields(linear).numbers("full_attn_layers")]
    elif fields.family == "falcon_h1":
        return (LayerKind.HYBRID,) * len(layers)
    else:
        return ()
    return tuple(attends if layer in full else other for layer in layers)


def _every(fields: ModelFields, default_period: int | None, default_offset: int) -> list[int]:
    """Return the layers that Jamba's period and offset mean."""
    period = fields.config.integer("attn_layer_period", default_period)
    offset = fields.config.fields.get("attn_layer_offset", default_offset)
    if type(offset) is not int or not 0 <= offset < period:
        raise fields.error("attn_layer_offset", f"{offset!r} is not in [0, {period})")
    return list(range(offset, fields.num_layers, period))


def _only_states(fields: ModelFields) -> tuple[LayerKind, ...]:
    if fields.family in _ONLY_STATES:
        return (LayerKind.STATE,) * fields.num_layers
    if fields.family in _STATES_UNREAD:
        raise fields.error("model_type", f"the states of {fields.family} are not known")
    unread = next((name for name in _HAS_STATES if name in fields.config), None)
    if unread is not None:
        raise fields.error(unread, f"which layers of {fields.family or 'this model'} have states is unknown")
    unread = next((name for name in _UNREAD if name in fields.config), None)
    if unread is not None:
        raise fields.error(unread, "changes what layers keep, and is not read")
    return ()


def _windowed(fields: ModelFields) -> tuple[LayerKind, ...]:
    """Read layers that all attend, some or all of them through a window."""
    config, layers = fields.config, range(fields.num_layers)
    has_window = "sliding_window" in config or "attention_chunk_size" in config
    if not has_window or not config.flag("use_sliding_window", fields.family not in _WINDOWS_MUST_BE_ON):
        return (LayerKind.FULL,) * len(layers)
    written = "sliding_window_pattern" if "sliding_window_pattern" in config else "_sliding_window_pattern"
    if isinstance(config.fields.get(written), str):  # EXAONE: L is local, G is global
        pattern = config.text(written)
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.error(written, f"{pattern!r} is not made of L and G")
        local = [pattern[layer % len(pattern)] == "L" for layer in layers]
    elif written in config or fields.family in _FULL_EVERY:
        every = config.integer(written, _FULL_EVERY.get(fields.family))
        local = [(layer + 1) % every != 0 for layer in layers]
    else:  # Qwen2's first layers see everything
        first = config.fields.get("max_window_layers", 28 if fields.family in _WINDOWS_MUST_BE_ON else 0)
        if type(first) is not int or first < 0:
            raise fields.error("max_window_layers", f"{first!r} is no whole number")
        local = [layer >= first for layer in layers]
    return tuple(LayerKind.WINDOW if is_local else LayerKind.FULL for is_local in local)
