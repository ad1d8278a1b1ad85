"""The numbers that tell one decoder-only family from another, and how they are read from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.engine.model_config import ModelConfig
from twinpool.engine.rope import RopeConfig, read_rope

ACTIVATIONS = ("silu",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything the decoder needs to know; a family is a function from config.json to this."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_dim: int
    inner_dim: int  # of the feed-forward part
    vocab_size: int  # rows of the embedding, padding included
    norm_epsilon: float
    rope: RopeConfig
    windows: tuple[int | None, ...]  # one per layer: tokens a token sees, itself included; None is all
    qkv_bias: bool = False
    out_bias: bool = False
    feed_forward_bias: bool = False
    head_norms: bool = False  # each query and key head is normalised before it is rotated
    tied: bool = False  # the embedding is the output matrix too

    @property
    def num_layers(self) -> int:
        return len(self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyDefaults:
    """What a field that config.json leaves out means, as in transformers."""

    max_tokens: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: model_dim / num_heads


def read_decoder_config(
    config: ModelConfig,
    defaults: FamilyDefaults,
    *,
    windows: tuple[int | None, ...],
    qkv_bias: bool = False,
    out_bias: bool = False,
    feed_forward_bias: bool = False,
    head_norms: bool = False,
) -> DecoderConfig:
    """Read what all families spell alike; the rest is the family's own.

    Raises:
        ModelError: A field is missing, does not fit the others, or asks for what we cannot do.
    """
    config.choice("hidden_act", ACTIVATIONS, "silu")
    model_dim = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    # A written null means one KV head per query head in every family; only an absent field is the default.
    written = "num_key_value_heads" in config.fields
    num_kv_heads = config.integer(
        "num_key_value_heads", num_heads if written else defaults.num_kv_heads or num_heads
    )
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads")
    if "head_dim" not in config and defaults.head_dim is None and model_dim % num_heads:
        raise config.error("num_attention_heads", f"{num_heads} does not divide hidden_size, {model_dim}")
    head_dim = config.integer("head_dim", defaults.head_dim or model_dim // num_heads)
    max_tokens = config.integer("max_position_embeddings", defaults.max_tokens)
    return DecoderConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        model_dim=model_dim,
        inner_dim=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim=head_dim, max_tokens=max_tokens),
        windows=windows,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        feed_forward_bias=feed_forward_bias,
        head_norms=head_norms,
        tied=config.flag("tie_word_embeddings", False),
    )


def same_window(config: ModelConfig, window: int | None) -> tuple[int | None, ...]:
    """Return ``window`` for each of the model's layers."""
    return (window,) * config.integer("num_hidden_layers")


def qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Read which layers have a sliding window: named one by one, or all from ``max_window_layers`` on.

    Raises:
        ModelError: A kind of layer is unknown, or the names do not fit the layers or the window.
    """
    num_layers = config.integer("num_hidden_layers")
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    names = config.texts("layer_types")
    if not names:
        first = config.fields.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise config.error("max_window_layers", f"{first!r} is no whole number")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(names) != num_layers:
        raise config.error("layer_types", f"{len(names)} names for {num_layers} layers")
    kinds = {"full_attention": None, "sliding_attention": window}
    for name in names:
        if name not in kinds:
            raise config.error("layer_types", f"{name!r} is none of {', '.join(kinds)}")
        if name == "sliding_attention" and window is None:
            raise config.error("layer_types", "a sliding layer, but no window is in use")
    return tuple(kinds[name] for name in names)
