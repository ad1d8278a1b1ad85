"""Small GGUF files, written as llama.cpp's converter writes them, with the weights they must become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ("<|bos|>", "<|end|>")
MARKUP = "<think>"
Weights = dict[str, np.ndarray[Any, Any]]

_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_BIASES = {f"self_attn.{name}_proj.bias": f"attn_{name}.bias" for name in "qkv"}


def random_weights(*, vocab_size: int, biases: bool = False, lm_head: bool = False) -> Weights:
    """Weights of a model of two layers under their Hugging Face names, in float32."""
    random = np.random.default_rng(0)
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if lm_head:
        shapes["lm_head.weight"] = (vocab_size, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv, HIDDEN)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv, HIDDEN)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[prefix + "mlp.gate_proj.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[prefix + "mlp.up_proj.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, FEED_FORWARD)
        if biases:
            shapes[prefix + "self_attn.q_proj.bias"] = (HIDDEN,)
            shapes[prefix + "self_attn.k_proj.bias"] = (kv,)
            shapes[prefix + "self_attn.v_proj.bias"] = (kv,)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def byte_vocabulary() -> list[str]:
    """256 byte tokens, one merge, two control tokens and one that is only added."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", *SPECIAL, MARKUP]


def write_gguf(
    path: Path,
    weights: Weights,
    *,
    architecture: str = "llama",
    quantization: str = "F32",
    pre: str = "smollm",
    numbers: dict[str, float] | None = None,
    words: dict[str, str] | None = None,
    extra: Weights | None = None,
) -> Weights:
    """Write ``weights`` and return what must come out of the file again, rounding included.

    Args:
        numbers: Further fields of the architecture, float or int.
        words: The same for strings.
        extra: Further tensors, under llama.cpp's names.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (numbers or {}).items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        else:
            writer.add_float32(f"{architecture}.{key}", value)
    for key, word in (words or {}).items():
        writer.add_string(f"{architecture}.{key}", word)
    _add_tokenizer(writer, pre)
    kind = GGMLQuantizationType[quantization]
    expected = {}
    for name, values in weights.items():
        stored, its_kind = values, GGMLQuantizationType.F32
        if values.ndim == 2 and kind != its_kind:
            its_kind = kind
            stored = quantize(_as_llama_cpp(name, values, architecture), kind)
            rounded = dequantize(stored, kind).reshape(values.shape)
            expected[name] = _as_hugging_face(name, rounded, architecture)
        else:
            stored = _as_llama_cpp(name, values, architecture)
            expected[name] = values
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=its_kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = byte_vocabulary()
    special = [tokens.index(token) for token in SPECIAL]
    kinds = [3 if index in special else 1 for index in range(len(tokens))]
    kinds[tokens.index(MARKUP)] = 4
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(special[0])
    writer.add_eos_token_id(special[1])
    writer.add_eot_token_id(special[0])
    writer.add_chat_template("{{ messages[0]['content'] }}")


def write_sentence_piece(path: Path) -> list[str]:
    """Write a file whose tokenizer is of Llama 2's kind and return its tokens; its weights are missing."""
    words = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "bc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    # The better the score, the earlier a merge: "ab" before "bc", though "bc" is the longer way to "abc".
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -3.0, -2.0, -4.0]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


def _gguf_name(name: str) -> str:
    if name == "lm_head.weight":
        return "output.weight"
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{(_LAYER | _BIASES)[rest]}"


def _heads(name: str, architecture: str) -> int:
    if architecture != "llama":
        return 0
    return HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0


def _as_llama_cpp(name: str, values: np.ndarray[Any, Any], architecture: str) -> np.ndarray[Any, Any]:
    """What ``permute`` in llama.cpp's convert_hf_to_gguf.py does."""
    heads = _heads(name, architecture)
    if not heads:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _as_hugging_face(name: str, values: np.ndarray[Any, Any], architecture: str) -> np.ndarray[Any, Any]:
    """Undo it row by row, in a way of its own: pair p of a head is rows p and p + half."""
    heads = _heads(name, architecture)
    if not heads:
        return values
    result = np.empty_like(values)
    size = values.shape[0] // heads
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                result[head * size + half * (size // 2) + pair] = values[head * size + 2 * pair + half]
    return result
