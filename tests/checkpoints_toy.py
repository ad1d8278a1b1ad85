"""Checkpoints of a few hundred kilobytes, written on the fly: random ones per family, and a scripted one.

Written without transformers, so that a test process starts fast; knows nothing of the engine that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD, END, USER, ASSISTANT = 256, 257, 258, 259, 260, 261
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
TOKENIZER_SIZE = 262  # 256 bytes, then the specials
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FAMILY_CONFIG: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 32, "use_sliding_window": False},
}
_ABSENT = object()


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_shards: int = 1,
    write_lm_head: bool | None = None,
    **overrides: object,
) -> Path:
    """Write a random model with the byte tokenizer into ``folder`` and return it.

    Two layers of 64 dimensions, 4 query and 2 KV heads, 1024 tokens of context, a vocabulary of 262.
    Token ids 0 to 255 are bytes; text and ids convert one to one.  The embedding is untied and
    ``tie_word_embeddings`` is absent unless it is overridden.

    Args:
        folder: Created if it is missing.
        family: One of FAMILIES.
        seed: Equal seeds give equal weights.
        dtype: Of the weights on disk.
        num_shards: More than one writes an index too.
        write_lm_head: None writes it unless the embedding is tied; True writes a redundant copy then.
        overrides: Fields of config.json; a value of ``absent()`` removes one.
    """
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": TOKENIZER_SIZE,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": dtype,
        **_FAMILY_CONFIG[family],
        **overrides,
    }
    config = {name: value for name, value in config.items() if value is not _ABSENT}
    weights = _random_weights(config, np.random.default_rng(seed))
    tied = bool(config.get("tie_word_embeddings", False))
    if tied and write_lm_head:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    elif tied or write_lm_head is False:
        del weights["lm_head.weight"]
    _write(folder, config, weights, dtype=dtype, num_shards=num_shards)
    write_tokenizer(folder)
    return folder


def absent() -> object:
    """Return the mark that removes a field of config.json in ``make_checkpoint``."""
    return _ABSENT


def make_successor_checkpoint(
    folder: Path,
    script: Sequence[str | bytes] | Mapping[int, int],
    *,
    finish: int = EOS,
    **overrides: object,
) -> Path:
    """Write a llama model whose next token is a fixed function of the last one, and return ``folder``.

    A sequence of pieces becomes a chain: any token outside the script is followed by the first
    piece, each piece by the next, the last by ``finish``.  A piece of one byte is that byte's token,
    any other piece is a token of its own (see ``piece_ids``); a piece may repeat only where the same
    piece follows.
    A mapping gives the next token id of each id directly; an id that is not in it is followed by ``finish``.
    The largest logit is 16 or more above all others.
    """
    if isinstance(script, Mapping):
        pieces: tuple[bytes, ...] = ()
        following = dict.fromkeys(range(TOKENIZER_SIZE), finish) | dict(script)
    else:
        pieces = tuple(piece.encode() if isinstance(piece, str) else piece for piece in script)
        following = _chain(piece_ids(pieces), finish=finish)
    own = _own_pieces(pieces)
    size = TOKENIZER_SIZE + len(own)
    for token_id in range(size):
        following.setdefault(token_id, finish)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": size,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **overrides,
    }
    weights = _random_weights(config, np.random.default_rng(0))
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:] = 0.0
    weights["model.embed_tokens.weight"] = np.eye(size, dtype=np.float32)
    weights["model.norm.weight"] = np.ones(size, dtype=np.float32)
    head = np.zeros((size, size), dtype=np.float32)
    for token_id, next_id in following.items():
        head[next_id, token_id] = 1.0
    weights["lm_head.weight"] = head
    _write(folder, config, weights, dtype="float32", num_shards=1)
    write_tokenizer(folder, extra=own)
    return folder


def piece_ids(script: Sequence[str | bytes]) -> tuple[int, ...]:
    """Return the token ids of a script's pieces, as ``make_successor_checkpoint`` numbers them."""
    pieces = tuple(piece.encode() if isinstance(piece, str) else piece for piece in script)
    own = _own_pieces(pieces)
    return tuple(piece[0] if len(piece) == 1 else TOKENIZER_SIZE + own.index(piece) for piece in pieces)


def write_tokenizer(folder: Path, *, extra: Sequence[bytes] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json: bytes, specials, then ``extra`` pieces."""
    alphabet = _byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    for i, piece in enumerate(extra):
        vocab["".join(alphabet[byte] for byte in piece)] = TOKENIZER_SIZE + i
    for i, special in enumerate(SPECIALS):
        vocab[special] = 256 + i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(special, special=True, normalized=False) for special in SPECIALS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _chain(ids: Sequence[int], *, finish: int) -> dict[int, int]:
    following: dict[int, int] = {}
    for token_id, next_id in zip(ids, [*ids[1:], finish], strict=True):
        assert following.setdefault(token_id, next_id) == next_id, (
            f"token {token_id} repeats and goes on differently"
        )
    for token_id in range(TOKENIZER_SIZE):
        following.setdefault(token_id, ids[0])
    return following


def _own_pieces(pieces: Sequence[bytes]) -> list[bytes]:
    return list(dict.fromkeys(piece for piece in pieces if len(piece) > 1))


def _random_weights(config: Mapping[str, object], rng: np.random.Generator) -> dict[str, np.ndarray]:
    def number(name: str) -> int:
        value = config[name]
        assert isinstance(value, int)
        return value

    family = config["model_type"]
    model, inner, vocab = number("hidden_size"), number("intermediate_size"), number("vocab_size")
    heads = number("num_attention_heads")
    kv_heads = number("num_key_value_heads") if config["num_key_value_heads"] else heads
    head_dim = number("head_dim") if "head_dim" in config else model // heads

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * (gain / columns**0.5)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1.0 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def bias(size: int) -> np.ndarray:
        return (0.3 * rng.standard_normal(size)).astype(np.float32)

    weights = {"model.embed_tokens.weight": (rng.standard_normal((vocab, model)) * 0.3).astype(np.float32)}
    for layer in range(number("num_hidden_layers")):
        name = f"model.layers.{layer}"
        weights[f"{name}.input_layernorm.weight"] = norm(model)
        sizes = {
            "q": (heads * head_dim, 1.5),
            "k": (kv_heads * head_dim, 1.5),
            "v": (kv_heads * head_dim, 1.0),
        }
        for part, (rows, gain) in sizes.items():
            weights[f"{name}.self_attn.{part}_proj.weight"] = matrix(rows, model, gain)
            if family == "qwen2" or config.get("attention_bias"):
                weights[f"{name}.self_attn.{part}_proj.bias"] = bias(rows)
        weights[f"{name}.self_attn.o_proj.weight"] = matrix(model, heads * head_dim)
        if config.get("attention_bias") and family != "qwen2":
            weights[f"{name}.self_attn.o_proj.bias"] = bias(model)
        if family == "qwen3":
            weights[f"{name}.self_attn.q_norm.weight"] = norm(head_dim)
            weights[f"{name}.self_attn.k_norm.weight"] = norm(head_dim)
        weights[f"{name}.post_attention_layernorm.weight"] = norm(model)
        for part, rows, columns in (("gate", inner, model), ("up", inner, model), ("down", model, inner)):
            weights[f"{name}.mlp.{part}_proj.weight"] = matrix(rows, columns)
            if config.get("mlp_bias"):
                weights[f"{name}.mlp.{part}_proj.bias"] = bias(rows)
    weights["model.norm.weight"] = norm(model)
    weights["lm_head.weight"] = matrix(vocab, model, 2.0)
    return weights


def _write(
    folder: Path,
    config: Mapping[str, object],
    weights: Mapping[str, np.ndarray],
    *,
    dtype: str,
    num_shards: int,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: torch.from_numpy(weight).to(getattr(torch, dtype)) for name, weight in weights.items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def _byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
