"""A checkpoint folder becomes a model: which family, which numbers, which end tokens, and a fingerprint.

Reads JSON and safetensors; runs no code from the folder (``auto_map`` is not looked at).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from twinpool.core.errors import ConfigError, ModelError
from twinpool.core.layout import DTYPE_BYTES, KVLayout
from twinpool.engine import models
from twinpool.engine.decoder import Decoder
from twinpool.engine.decoder_config import DecoderConfig
from twinpool.engine.model_config import ModelConfig, read_json
from twinpool.engine.parallel import RankGroup, SingleRank
from twinpool.engine.weights import Weights, weight_files

# Of these, the numbers of an answer do not depend.
_NOT_FINGERPRINTED = (
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "auto_map",
    "use_cache",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the rest of a worker needs to know of its model."""

    architecture: str  # model_type of config.json: a file name in twinpool/engine/models
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_tokens: int  # prompt and answer together
    vocab_size: int  # width of the logits, padding included
    sampling_vocab_size: int  # ids from here on have no text and are never chosen
    eos_ids: tuple[int, ...]  # each of them ends an answer
    dtype: str  # of weights and KV
    fingerprint: Mapping[str, str]  # every setting two workers must share, by name

    def layout(self, *, block_tokens: int, tp_size: int = 1) -> KVLayout:
        """Return the layout of a KV cache for this model, over all ranks.

        Raises:
            ConfigError: KV heads and ranks do not divide each other.
        """
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            dtype=self.dtype,
            tp_size=tp_size,
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, or one rank's share of it."""

    model: Decoder
    spec: ModelSpec  # of the whole model
    group: RankGroup  # the ranks that compute it together


def load_model(
    folder: Path, *, device: str = "cpu", dtype: str = "auto", group: RankGroup | None = None
) -> LoadedModel:
    """Load a Hugging Face checkpoint.

    Args:
        folder: Holds config.json and safetensors files.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on a CPU, bfloat16 on a GPU.
        group: The ranks of which this process is one; it loads its own share only.  None: it is alone.

    Raises:
        ModelError: The checkpoint is damaged or asks for something we cannot do; the message names it.
        ConfigError: The device or the dtype is unknown or absent, or the ranks cannot share the heads.
    """
    group = group or SingleRank()
    torch_device = parse_device(device)
    dtype_name = resolve_dtype(dtype, torch_device)
    config = ModelConfig(read_json(folder / "config.json"))
    decoder_config = describe(config)
    spec = _spec(folder, config, decoder_config, dtype_name)
    torch_dtype: torch.dtype = getattr(torch, dtype_name)
    weights = Weights(folder, device=torch_device, dtype=torch_dtype)
    model = Decoder(decoder_config, weights, group=group, device=torch_device, dtype=torch_dtype)
    return LoadedModel(model, spec, group)


def known_families() -> tuple[str, ...]:
    """List the values of ``model_type`` that can be served: the files of twinpool/engine/models."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(models.__path__)))


def describe(config: ModelConfig) -> DecoderConfig:
    """Find the family by name and let it read the config.

    Raises:
        ModelError: The family is unknown, or the model has a part that the family does not have.
    """
    family = config.choice("model_type", known_families())
    module = importlib.import_module(f"{models.__name__}.{family}")
    for architecture in config.texts("architectures"):
        if architecture != module.ARCHITECTURE:
            raise config.error("architectures", f"{architecture!r} is not {module.ARCHITECTURE}")
    quantization = config.part("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", "unnamed")
        raise config.error("quantization_config", f"{method!r} weights cannot be read, only plain floats")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in config:
            raise config.error(name, "mixtures of experts are not served")
    described: DecoderConfig = module.describe(config)
    return described


def parse_device(device: str) -> torch.device:
    """Return the torch device of ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: It is none of them, or this host has no such device.
    """
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (":" in device and (kind == "cpu" or not number.isdecimal())):
        raise ConfigError("--device", f"{device!r} is none of cpu, cuda, cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError("--device", f"{device!r} is not here, torch sees {torch.cuda.device_count()} GPUs")
    return torch.device(kind, int(number or 0)) if kind == "cuda" else torch.device("cpu")


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """Return the dtype that ``auto`` stands for, or the one named.

    Raises:
        ConfigError: The name is unknown.
    """
    if dtype == "auto":
        return "float32" if device.type == "cpu" else "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise ConfigError("--dtype", f"{dtype!r} is none of auto, {', '.join(DTYPE_BYTES)}")
    return dtype


def _spec(folder: Path, config: ModelConfig, decoder: DecoderConfig, dtype: str) -> ModelSpec:
    tokenizer = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else {}
    vocabulary = _token_ids(tokenizer)
    spoken = min(decoder.vocab_size, max(vocabulary.values()) + 1) if vocabulary else decoder.vocab_size
    family = config.text("model_type")
    return ModelSpec(
        architecture=family,
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        max_model_tokens=decoder.rope.max_tokens,
        vocab_size=decoder.vocab_size,
        sampling_vocab_size=spoken,
        eos_ids=_eos_ids(folder, config, vocabulary),
        dtype=dtype,
        fingerprint={
            "architecture": family,
            "num_layers": str(decoder.num_layers),
            "num_heads": str(decoder.num_heads),
            "num_kv_heads": str(decoder.num_kv_heads),
            "head_dim": str(decoder.head_dim),
            "model_dim": str(decoder.model_dim),
            "vocab_size": str(decoder.vocab_size),
            "sampling_vocab_size": str(spoken),
            "rope": decoder.rope.kind,
            "rope_frequencies": _digest(repr(decoder.rope).encode()),
            "windows": _windows(decoder),
            "dtype": dtype,
            "config": _config_digest(config),
            "weights": _weights_digest(folder),
            "tokenizer": _file_digest(folder / "tokenizer.json"),
        },
    )


def _eos_ids(folder: Path, config: ModelConfig, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Unite the end tokens of all files that name some: honouring one of several lets an answer run on."""
    found = set(_id_list(config))
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json")
        found.update(_id_list(ModelConfig(generation, source="generation_config.json")))
    if (folder / "tokenizer_config.json").is_file():
        token = read_json(folder / "tokenizer_config.json").get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in vocabulary:
            found.add(vocabulary[text])
    return tuple(sorted(found))


def _id_list(config: ModelConfig) -> list[int]:
    value = config.fields.get("eos_token_id")
    ids = []
    for token_id in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise config.error("eos_token_id", f"{token_id!r} is no token id")
        ids.append(token_id)
    return ids


def _token_ids(tokenizer: Mapping[str, object]) -> dict[str, int]:
    """Read every token with its id from a tokenizer.json."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids.update(vocab)
    elif isinstance(vocab, list):  # Unigram: pairs of text and score, in the order of ids
        ids.update({entry[0]: token_id for token_id, entry in enumerate(vocab)})
    for token in added if isinstance(added, list) else []:
        ids[token["content"]] = token["id"]
    if not all(isinstance(token_id, int) for token_id in ids.values()):
        raise ModelError("--model", "tokenizer.json: a token's id is no whole number")
    return ids


def _windows(decoder: DecoderConfig) -> str:
    names = ["all" if window is None else str(window) for window in decoder.windows]
    return names[0] if len(set(names)) == 1 else ",".join(names)


def _config_digest(config: ModelConfig) -> str:
    fields = {name: value for name, value in config.fields.items() if name not in _NOT_FINGERPRINTED}
    return _digest(json.dumps(fields, sort_keys=True).encode())


def _weights_digest(folder: Path) -> str:
    """Hash names, sizes and 64 pieces of 4 KiB of each weight file: two models differ nearly everywhere."""
    hasher = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        hasher.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for piece in range(64):
                file.seek(max(0, size - 4096) * piece // 63)
                hasher.update(file.read(4096))
    return hasher.hexdigest()[:16]


def _file_digest(path: Path) -> str:
    return _digest(path.read_bytes()) if path.is_file() else "none"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
