"""Sizes of a model, under whatever name its config.json gives them.

Knows spellings and what a family means by a field that it leaves out; does not know what layers there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from twinpool.core.errors import ModelError
from twinpool.engine.model_config import ModelConfig

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MODEL_DIM = ("hidden_size", "n_embd", "n_embed", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
INNER = (
    "intermediate_size_mlp",
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
)  # feed-forward
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "num_attention_groups")
_KV_HEAD_LISTS = ("num_kv_heads", "num_key_value_heads", "num_key_value_heads_per_layer")  # OpenELM, DeciLM
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
_MAX_TOKENS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_VOCABULARY = ("vocab_size", "padded_vocab_size")
_LANGUAGE = ("text_config", "llm_config", "language_config")  # the part that keeps KV, of a model that sees
# What transformers takes for a field that is absent, where checkpoints do leave it out.
_DEFAULTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "gemma3_text": {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
        "gemma2": {"head_dim": 256},
        "mistral": {"num_key_value_heads": 8},
        "qwen2": {"num_key_value_heads": 32},
        "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    }
)
# Each changes what layers keep, and none is read: layers pruned by search, other heads in layers with a
# window, layers that keep the KV of an image.
_UNREAD = ("block_configs", "attention_other_setting", "cross_attention_layers")
_ONE_UNLESS_SAID = ("falcon", "gpt_bigcode")  # families whose multi_query is on where it is absent
_KINDS_OF_PARTS = ("grouped_query_attention", "multihead_attention", "multiquery_attention")
_MOST_LAYERS = 10_000  # more are a slip, and would take hours to go through
_MOST = 10**12  # of anything that is counted


class ModelFields:
    """The fields of a config.json, or of the language part of it.

    Raises:
        ModelError: It is a model with an encoder, whose cross attention is not planned; or a number is too
            large; or a field that is not read changes what layers keep.
    """

    def __init__(self, config: ModelConfig) -> None:
        part = next((config.part(name) for name in _LANGUAGE if name in config), None)
        self.config = config if part is None else part
        self.family = self.config.text("model_type", config.text("model_type", ""))
        self._defaults = _DEFAULTS.get(self.family, {})
        if config.flag("is_encoder_decoder", False):
            raise config.error("is_encoder_decoder", "models with an encoder are not planned")
        for name, value in self.config.fields.items():
            if name in _UNREAD and value:
                raise self.config.error(name, "changes what layers keep, and is not read")
            if isinstance(value, int) and value > _MOST:
                raise self.config.error(name, f"is more than {_MOST}")

    @property
    def num_layers(self) -> int:
        described = self.config.texts("layers_block_type")
        layers = self.integer(_LAYERS, len(described) or None)
        if layers > _MOST_LAYERS:
            raise self.error(self._name(_LAYERS) or _LAYERS[0], f"{layers} is more than {_MOST_LAYERS}")
        return 2 * layers if self.family == "longcat_flash" else layers  # each of those attends twice

    @property
    def model_dim(self) -> int:
        return self.integer(_MODEL_DIM)

    @property
    def num_heads(self) -> int:
        return self.integer(HEADS)

    @property
    def vocab_size(self) -> int:
        return self.integer(_VOCABULARY)

    @property
    def max_tokens(self) -> int | None:
        """The longest sequence; None if the config does not say, as where there are no positions."""
        return self.optional(_MAX_TOKENS)

    def kv_heads(self) -> tuple[int, ...]:
        """Return the KV heads of each layer.

        Raises:
            ModelError: They do not divide the query heads, or a list does not fit the layers.
        """
        layers = self.num_layers
        for name in _KV_HEAD_LISTS:
            value = self.config.fields.get(name)
            if isinstance(value, list):
                if len(value) != layers or not all(
                    type(heads) is int and 0 < heads < _MOST for heads in value
                ):
                    raise self.config.error(name, f"{value!r} is no list of {layers} numbers above 0")
                return tuple(value)
        heads = self.num_heads
        kv_heads = (
            self._one_kv_head()
            or self._kv_heads_of_parts()
            or self._kv_heads_of_groups()
            or self.optional(_KV_HEADS)
            or heads
        )
        if heads % kv_heads:
            name = self._name(_KV_HEADS) or _KV_HEADS[0]
            raise self.config.error(name, f"{kv_heads} does not divide {heads} heads")
        return (kv_heads,) * layers

    def head_dim(self) -> int:
        """Return the elements of a head; of its own where it is given, else model dim / heads.

        Zamba's attention sees the embedded token beside its input: twice that.

        Raises:
            ModelError: It is not given, and the heads do not divide the model dim.
        """
        given = self.optional(_HEAD_DIM)
        if given is not None:
            return given
        model_dim, heads = self.model_dim, self.num_heads
        if model_dim % heads:
            name = self._name(HEADS) or HEADS[0]
            raise self.config.error(name, f"{heads} does not divide hidden_size, {model_dim}")
        return model_dim // heads * (2 if self.family in ("zamba", "zamba2") else 1)

    def integer(self, names: Sequence[str], default: int | None = None) -> int:
        """Return the first of ``names`` that is there, a number of at least 1.

        Raises:
            ModelError: None is there and there is no default, or it is no such number.
        """
        value = self.optional(names)
        return self.config.integer(names[0], default) if value is None else value

    def optional(self, names: Sequence[str]) -> int | None:
        """Return the first of ``names`` that is there; None if none is."""
        name = self._name(names)
        if name is not None:
            return self.config.integer(name)
        written = any(name in self.config.fields for name in names)  # a written null is no default
        return None if written else self._defaults.get(names[0])

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers from 0 on; empty if the field is absent.

        Raises:
            ModelError: It is something else.
        """
        value = self.config.fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
            raise self.config.error(name, f"{value!r} is no list of whole numbers")
        return tuple(value)

    def error(self, name: str, problem: str) -> ModelError:
        """Return a complaint about one field."""
        return self.config.error(name, problem)

    def _name(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.config), None)

    def _one_kv_head(self) -> int | None:
        """Return 1 where all query heads share one KV head.

        Source:
            The rule is vLLM's ``get_total_num_kv_heads``: Falcon's new architecture has groups all the same.
        """
        is_new = self.config.flag("new_decoder_architecture", False)
        return 1 if self.config.flag("multi_query", self.family in _ONE_UNLESS_SAID) and not is_new else None

    def _kv_heads_of_parts(self) -> int | None:
        attention = self.config.part("attn_config")  # of dbrx and mpt
        if attention is None:
            return None
        kind = attention.choice("attn_type", _KINDS_OF_PARTS, _KINDS_OF_PARTS[0])
        if kind == "multiquery_attention":
            return 1
        return attention.integer("kv_n_heads") if "kv_n_heads" in attention else None

    def _kv_heads_of_groups(self) -> int | None:
        """Read ChatGLM: a number of groups counts where it is switched on."""
        if "multi_query_group_num" not in self.config:
            return None
        is_on = self.config.flag("multi_query_attention", False)
        return self.config.integer("multi_query_group_num") if is_on else self.num_heads
