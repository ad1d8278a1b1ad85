"""The ``config.json`` of a model that came as GGUF: from llama.cpp's names to Hugging Face's.

Whatever would change the model's numbers and is not understood here is refused, never dropped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinpool.checkpoints.gguf_file import GGUFFile
from twinpool.core.errors import ModelError

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
PERMUTED = ("llama",)  # llama.cpp stores their Q and K in the order of interleaved rotary pairs
ROPE_FACTORS = "rope_freqs.weight"

_FIELD = "--model"
_MISTRAL = ("MistralForCausalLM", "mistral")  # to llama.cpp it is a llama with a sliding window
_LLAMA3_ORIGINAL_TOKENS = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def architecture_of(gguf: GGUFFile) -> str:
    """Return llama.cpp's name of the architecture.

    Raises:
        ModelError: It is none that can be converted.
    """
    name = str(gguf.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(_FIELD, f"GGUF architecture {name} cannot be converted, known are {known}")
    if gguf.metadata.get(f"{name}.expert_count", 0):
        raise ModelError(_FIELD, f"GGUF architecture {name} with experts cannot be converted")
    return name


def make_config(gguf: GGUFFile) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ModelError: The architecture, rope scaling or a shape cannot be expressed.
    """
    name = architecture_of(gguf)
    fields = _Fields(gguf, name)
    num_heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // num_heads)
    for other in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(other, head_dim) != head_dim:
            raise ModelError(_FIELD, f"GGUF field {name}.{other} differs from the head size {head_dim}")
    theta = fields.number("rope.freq_base", 10000.0)
    sliding_window = fields.integer("attention.sliding_window", 0) if name == "llama" else 0
    class_name, model_type = _MISTRAL if sliding_window else ARCHITECTURES[name]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "torch_dtype": "float32",
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(gguf, fields, head_dim=head_dim, theta=theta),
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "use_cache": True,
    }
    if sliding_window:
        config["sliding_window"] = sliding_window
    for key in ("bos", "eos"):
        token_id = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{key}_token_id"] = int(token_id)
    return config


class _Fields:
    """The metadata of one architecture, checked for its type."""

    def __init__(self, gguf: GGUFFile, architecture: str) -> None:
        self._metadata = gguf.metadata
        self._architecture = architecture

    def get(self, key: str) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int):
            raise ModelError(
                _FIELD, f"GGUF field {self._architecture}.{key} is {value!r}, expected one integer"
            )
        return value

    def number(self, key: str, default: float) -> float:
        """Return a stored float32 as the decimal that its author wrote: 1e-05, not 9.999999747e-06."""
        value = self.get(key)
        return default if value is None else float(str(np.float32(value)))


def _rope_scaling(gguf: GGUFFile, fields: _Fields, *, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type") or "none"
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf.load(ROPE_FACTORS), head_dim=head_dim, theta=theta)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn" and fields.number("rope.scaling.attn_factor", 1.0) == 1.0:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
        }
    raise ModelError(_FIELD, f"GGUF rope scaling {kind} cannot be converted, known are linear, llama3, yarn")


def _llama3_scaling(factors: np.ndarray[Any, Any], *, head_dim: int, theta: float) -> dict[str, Any]:
    """Find the one setting of Llama 3's scaling that gives ``factors``, since GGUF keeps only its result."""
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (_LLAMA3_ORIGINAL_TOKENS / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    expected[wavelengths < _LLAMA3_ORIGINAL_TOKENS / _LLAMA3_HIGH] = 1.0
    expected[wavelengths > _LLAMA3_ORIGINAL_TOKENS / _LLAMA3_LOW] = factor
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError(_FIELD, f"GGUF tensor {ROPE_FACTORS} holds rope factors that are not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_TOKENS,
    }
