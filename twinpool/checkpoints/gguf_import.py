"""A GGUF file becomes an ordinary Hugging Face folder in float32.

Knows the names and the order of the weights.  Undoes two things that llama.cpp does to them: the
quantization, and the permutation of Q and K rows for its rotary embedding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from twinpool.checkpoints.gguf_config import PERMUTED, ROPE_FACTORS, architecture_of, make_config
from twinpool.checkpoints.gguf_file import GGUFFile
from twinpool.checkpoints.gguf_tokenizer import write_tokenizer
from twinpool.core.errors import ModelError

_SHARD_BYTES = 2 << 30
_FLOAT_BYTES = 4
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def import_gguf(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write ``config.json``, weights and tokenizer of the GGUF file ``path`` into the empty ``folder``.

    Raises:
        ModelError: The file is damaged, or its architecture, quantization, rope scaling, tokenizer or one
            of its tensors cannot be expressed.
    """
    progress(f"converting {path.name}: reading")
    gguf = GGUFFile(path)
    config = make_config(gguf)
    names = {name: _hf_name(name) for name in gguf.tensors if name != ROPE_FACTORS}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(gguf, config))
    progress(f"converting {path.name}: tokenizer")
    write_tokenizer(gguf, folder)
    permuted = architecture_of(gguf) in PERMUTED
    shards = list(_shards(gguf, list(names)))
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        progress(f"converting {path.name}: weights, part {index} of {len(shards)}")
        weights = {names[name]: _weight(gguf, name, config, permuted=permuted) for name in shard}
        file_name = "model.safetensors"
        if len(shards) > 1:
            file_name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(weights, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(weights, file_name))
    if len(shards) > 1:
        total = sum(_num_bytes(gguf, name) for name in names)
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", content)


def _generation_config(gguf: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return where an answer begins and ends; a model may end a turn otherwise than a text."""
    content: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    end_of_turn = gguf.metadata.get("tokenizer.ggml.eot_token_id")
    if end_of_turn is not None and end_of_turn != content.get("eos_token_id"):
        ends = [content["eos_token_id"]] if "eos_token_id" in content else []
        content["eos_token_id"] = [*ends, int(end_of_turn)]
    return content


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        raise ModelError("--model", f"GGUF tensor {name} has no place in a model of this architecture")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def _weight(gguf: GGUFFile, name: str, config: dict[str, Any], *, permuted: bool) -> npt.NDArray[np.float32]:
    values = gguf.load(name)
    if permuted and ".attn_q." in name:
        return _in_halves(values, config["num_attention_heads"])
    if permuted and ".attn_k." in name:
        return _in_halves(values, config["num_key_value_heads"])
    return values


def _in_halves(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorder rows from rotary pairs side by side (llama.cpp) to first halves, then second (Hugging Face).

    Source: the inverse of ``permute`` in ggml-org/llama.cpp, convert_hf_to_gguf.py.
    """
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, half, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _shards(gguf: GGUFFile, names: list[str]) -> Iterator[list[str]]:
    """Split ``names`` in order, so that a model of any size is converted in bounded memory."""
    shard: list[str] = []
    held = 0
    for name in names:
        if shard and held + _num_bytes(gguf, name) > _SHARD_BYTES:
            yield shard
            shard, held = [], 0
        shard.append(name)
        held += _num_bytes(gguf, name)
    yield shard


def _num_bytes(gguf: GGUFFile, name: str) -> int:
    return _FLOAT_BYTES * int(np.prod(gguf.tensors[name].shape, dtype=np.int64))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
