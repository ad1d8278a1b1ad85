"""Tokenizer folders of the two kinds that language models have, made on the fly."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ("<s>", "</s>", "<|user|>", "<|end|>")
MARKUP = "<think>"  # added, but not special
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|user|>' + message['role'] + '\n' + message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a word is a word and the end is the end",
    "caf\u00e9 na\u00efve \u4f60\u597d \u4f60\u597d \ud55c\uad6d",
    "if x == 1:\n    return x\n\n12345",
)
_SPACE = "\u2581"


def write_byte_level(folder: Path, *, adds_bos: bool = False, **settings: object) -> Path:
    """A byte-level BPE as of GPT-2, Llama 3 and Qwen; ``settings`` go into tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    return _write(folder, tokenizer, adds_bos=adds_bos, settings=settings)


def write_byte_fallback(folder: Path, *, adds_bos: bool = False, **settings: object) -> Path:
    """A BPE with byte fallback as of Llama 2 and Mistral, which marks spaces and drops the first one."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    # Each line starts a word of its own, so no token spans two words.
    words = [word for line in _CORPUS for word in line.split()]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] == "<unk>"]
    return _write(folder, Tokenizer.from_str(json.dumps(state)), adds_bos=adds_bos, settings=settings)


def write_metaspace(folder: Path) -> Path:
    """A tokenizer whose decoder is ``Metaspace`` alone."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _write(folder, tokenizer, adds_bos=False, settings={})


def _write(folder: Path, tokenizer: Tokenizer, *, adds_bos: bool, settings: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(MARKUP, special=False, normalized=False)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["<s>", "$A"], special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
