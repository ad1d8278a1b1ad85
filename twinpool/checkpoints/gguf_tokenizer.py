"""The tokenizer inside a GGUF file becomes ``tokenizer.json`` and ``tokenizer_config.json``.

GGUF names the rule that splits text before the merges, but does not hold it; the rules known here
are those of ggml-org/llama.cpp, src/llama-vocab.cpp.  Any other one is refused by its name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from twinpool.checkpoints.gguf_file import GGUFFile
from twinpool.core.errors import ModelError

_FIELD = "--model"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = ("gpt-2", "gpt2", "phi-2", "olmo")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_WHOLE_TOKENS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token needs no merges


def write_tokenizer(gguf: GGUFFile, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template into ``folder``.

    Raises:
        ModelError: The file has no tokenizer, or one of an unknown kind.
    """
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in gguf.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if not isinstance(fields.get("tokens"), list):
        raise ModelError(_FIELD, "the GGUF file has no tokenizer")
    kind = fields.get("model")
    if kind == "gpt2":
        tokenizer = _byte_level(fields)
    elif kind == "llama":
        tokenizer = _sentence_piece(fields)
    else:
        raise ModelError(_FIELD, f"GGUF tokenizer {kind} cannot be converted, known are gpt2, llama")
    _add_special_tokens(tokenizer, fields)
    add_bos = bool(fields.get("add_bos_token", kind == "llama" or fields.get("pre") in _WHOLE_TOKENS_FIRST))
    if add_bos and "bos_token_id" in fields:
        _print_bos(tokenizer, fields)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(fields, template=gguf.metadata.get("tokenizer.chat_template"))
    config["model_max_length"] = gguf.metadata.get(f"{gguf.metadata['general.architecture']}.context_length")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _byte_level(fields: dict[str, Any]) -> Tokenizer:
    pre = str(fields.get("pre", "gpt-2"))
    vocab = {token: token_id for token_id, token in enumerate(fields["tokens"])}
    merges = [_pair(merge) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_TOKENS_FIRST))
    steps: list[pre_tokenizers.PreTokenizer]
    if pre in _GPT2:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in _DIGITS:
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    elif pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        known = ", ".join(sorted((*_GPT2, *_DIGITS, *_SPLITS)))
        raise ModelError(_FIELD, f"GGUF pre-tokenizer {pre} cannot be converted, known are {known}")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if _SPLITS.get(pre) == _QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _sentence_piece(fields: dict[str, Any]) -> Tokenizer:
    tokens = fields["tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = tokens[fields.get("unknown_token_id", 0)]
    merges = _merges_by_score(vocab, fields["scores"])
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """List every way to make a token of two others, best token first.

    Source: ``generate_merges`` in huggingface/transformers, convert_slow_tokenizer.py.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[token_id], vocab[left], vocab[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    kinds = fields.get("token_type") or []
    special = {token_id for token_id, kind in enumerate(kinds) if kind in {_UNKNOWN, _CONTROL}}
    special.update(int(fields[key]) for key in ("bos_token_id", "eos_token_id") if key in fields)
    for token_id, token in enumerate(fields["tokens"]):
        if token_id in special:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_id < len(kinds) and kinds[token_id] == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _print_bos(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    bos_id = int(fields["bos_token_id"])
    bos = fields["tokens"][bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
    )


def _tokenizer_config(fields: dict[str, Any], *, template: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in names.items():
        token_id = fields.get(f"{theirs}_token_id")
        if token_id is not None:
            config[f"{ours}_token"] = fields["tokens"][token_id]
    if template is not None:
        config["chat_template"] = template
    return config
