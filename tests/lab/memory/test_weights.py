"""Weights are counted as checkpoints store them and as each rank keeps them; those of others about."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints_toy import FAMILIES, make_checkpoint
from tests.lab.memory.configs import CONFIGS, LLAMA_31_8B
from twinpool.core.errors import ConfigError, ModelError
from twinpool.engine.decoder import Decoder
from twinpool.engine.load import describe, known_families
from twinpool.engine.weights import Weights
from twinpool.lab.memory.cache_format import FORMATS
from twinpool.lab.memory.cache_shape import CacheSettings
from twinpool.lab.memory.checkpoint_headers import read_headers
from twinpool.lab.memory.planned_model import model_of, read_model
from twinpool.lab.memory.tensors import list_tensors

VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True},
    {"intermediate_size": 131, "vocab_size": 301, "num_key_value_heads": 1},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tensors_are_those_of_the_checkpoint(
    tmp_path: Path, family: str, variant: dict[str, Any]
) -> None:
    model = read_model(make_checkpoint(tmp_path, family, num_shards=2, **_for(family, variant)))

    listed = {tensor.name: tensor.shape for tensor in list_tensors(model.fields)}

    assert listed == {name: stored.shape for name, stored in read_headers(tmp_path).items()}
    assert model.weights(dtype="float32", num_ranks=1).num_bytes == sum(
        stored.num_bytes for stored in model.stored.values()
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_plan_is_of_the_rank_that_keeps_most(
    tmp_path: Path, family: str, variant: dict[str, Any], num_ranks: int
) -> None:
    model = read_model(make_checkpoint(tmp_path, family, **_for(family, variant)))

    kept = [_decoder_bytes(tmp_path, model.config, _Rank(rank, num_ranks)) for rank in range(num_ranks)]

    assert model.weights(dtype="float32", num_ranks=num_ranks).num_bytes == max(kept)


def test_every_family_that_is_served_is_counted_exactly() -> None:
    for family in known_families():
        model = model_of({**LLAMA_31_8B, "model_type": family})

        assert model.is_served
        assert model.weights(dtype="float16", num_ranks=1).kind == "exact"


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: 3 ranks do not divide 32 query heads"):
        model_of(LLAMA_31_8B).weights(dtype="float16", num_ranks=3)


def test_the_weights_of_another_family_are_those_on_disk(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", model_type="stranger")
    model = read_model(tmp_path)
    elements = sum(stored.num_elements for stored in model.stored.values())

    assert model.weights(dtype="bfloat16", num_ranks=1).num_bytes == 2 * elements
    assert model.weights(dtype="bfloat16", num_ranks=1).kind == "exact"
    assert model.weights(dtype="bfloat16", num_ranks=2).kind == "estimate"


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "gpt_oss",
        "gemma2",
        "jamba",
        "qwen3_next",
        "falcon",
        "opt",
        "deepseek_v2",
        "mamba2",
        "falcon_h1",
    ],
)
def test_the_estimate_is_within_two_percent_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family)
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in reference.parameters())

    term = model_of(config.to_dict()).weights(dtype="bfloat16", num_ranks=1)

    assert term.num_bytes == pytest.approx(2 * counted, rel=0.02)
    assert term.kind == "estimate"


def test_a_mixture_of_no_experts_is_none() -> None:
    """Granite 4 writes num_local_experts: 0 where its feed-forward part is plain."""
    plain = {**CONFIGS["Mixtral-8x7B-v0.1"], "num_local_experts": None}
    none = {**plain, "num_local_experts": 0, "num_experts_per_tok": 0}

    assert model_of(none).weights(dtype="bfloat16", num_ranks=1) == model_of(plain).weights(
        dtype="bfloat16", num_ranks=1
    )


def test_quantised_weights_take_their_bits() -> None:
    """GPTQ, groups of 128: 4 bits and, for each group, a float16 scale and zero point."""
    quantised = {**CONFIGS["Mixtral-8x7B-v0.1"], "quantization_config": {"quant_method": "gptq", "bits": 4}}
    grouped = {**quantised, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    whole = model_of(CONFIGS["Mixtral-8x7B-v0.1"]).weights(dtype="bfloat16", num_ranks=1).num_bytes

    assert model_of(quantised).weights(dtype="bfloat16", num_ranks=1).num_bytes == whole // 4
    assert model_of(grouped).weights(dtype="bfloat16", num_ranks=1).num_bytes == whole * 17 // 64


@pytest.mark.parametrize(
    ("quantization", "numerator", "denominator"),  # of the bytes as bfloat16
    [
        # Groups of 128 weights of 4 bits share a scale of 16: 4 + 16/128 = 33/8 bits of 16.
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 4, "type": "int", "group_size": 128},
                        "targets": ["Linear"],
                    }
                },
            },
            *(33, 128),
        ),
        # FP8 with a scale per channel, which is not counted.
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": None}}
                },
            },
            *(1, 2),
        ),
        # NVFP4: 16 weights of 4 bits share a scale of 8: 4 + 8/16 = 9/2 bits of 16.
        (
            {
                "quant_method": "modelopt",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            *(9, 32),
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 9, 32),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1, 2),
    ],
)
def test_quantised_weights_take_the_bits_of_their_groups(
    quantization: dict[str, Any], numerator: int, denominator: int
) -> None:
    config = {**CONFIGS["Mixtral-8x7B-v0.1"], "quantization_config": quantization}

    term = model_of(config, num_parameters=2**30).weights(dtype="bfloat16", num_ranks=1)

    assert term.num_bytes == 2 * 2**30 * numerator // denominator
    assert term.kind == "estimate"


@pytest.mark.parametrize("bits", [65, 10**400])
def test_more_bits_than_a_weight_has_are_refused(bits: int) -> None:
    config = {**CONFIGS["Mixtral-8x7B-v0.1"], "quantization_config": {"quant_method": "gptq", "bits": bits}}

    with pytest.raises(ModelError, match="quantization_config: bits: is more than 64"):
        model_of(config).weights(dtype="bfloat16", num_ranks=1)


def test_heads_that_differ_from_layer_to_layer_are_not_served_and_an_estimate() -> None:
    """16 layers: half have one KV head of 64, half two; without norms, one matrix of 2 x 64 x 2048 a head."""
    config = {**CONFIGS["Llama-3.2-1B"], "num_key_value_heads": [1, 2] * 8}
    fewer = {**config, "num_key_value_heads": [1] * 16}

    term, smaller = (model_of(c).weights(dtype="bfloat16", num_ranks=1) for c in (config, fewer))

    assert term.kind == "estimate"
    assert term.num_bytes - smaller.num_bytes == 8 * 2 * 64 * 2048 * 2


def test_groups_that_do_not_tell_their_bits_are_refused() -> None:
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
    }
    config = {**CONFIGS["Mixtral-8x7B-v0.1"], "quantization_config": quantization}

    with pytest.raises(
        ModelError, match="quantization_config: config_groups: how many bits the weights of each"
    ):
        model_of(config).weights(dtype="bfloat16", num_ranks=1)


def test_gemma_3_is_planned_from_the_hubs_config() -> None:
    """It leaves out what transformers takes for granted: 262208 tokens, 8 heads of 256, 4 of them with KV.

    34 layers of 2 x 4 x 256 x 2 bytes a token, every sixth of which, 5 of them, sees everything.
    """
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    model = model_of({"model_type": "gemma3", "text_config": text}, num_parameters=4 * 10**9)

    settings = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", block_tokens=1)
    assert model.fields.vocab_size == 262208
    assert model.fields.max_tokens == 131072
    assert model.shape.token_bytes(settings) == 34 * 4096
    assert model.shape.unbounded_token_bytes(settings) == 5 * 4096


def test_a_way_of_quantising_that_is_not_known_is_named() -> None:
    config = {**CONFIGS["Mixtral-8x7B-v0.1"], "quantization_config": {"quant_method": "magic"}}

    with pytest.raises(ModelError, match="how many bits 'magic' weights have is not known; in a folder with"):
        model_of(config).weights(dtype="bfloat16", num_ranks=1)


def test_whoever_plans_may_say_how_many_parameters_there_are() -> None:
    model = model_of(CONFIGS["Mixtral-8x7B-v0.1"], num_parameters=46_700_000_000)

    assert model.weights(dtype="bfloat16", num_ranks=1).num_bytes == 93_400_000_000


@pytest.mark.parametrize(
    "damage", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b'{"a"']
)
def test_a_damaged_header_is_refused_with_its_file(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(damage)

    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_headers(tmp_path)


@dataclass(frozen=True)
class _Rank:
    """As much of a group of ranks as loading asks for."""

    rank: int
    size: int


def _for(family: str, variant: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a family's config does not know."""
    known = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}.get(family, ())
    return {name: value for name, value in variant.items() if "bias" not in name or name in known}


def _decoder_bytes(folder: Path, config: Any, rank: _Rank) -> int:
    cpu = torch.device("cpu")
    weights = Weights(folder, device=cpu, dtype=torch.float32)
    decoder = Decoder(describe(config), weights, group=rank, device=cpu, dtype=torch.float32)  # type: ignore[arg-type]
    parts = (decoder._embedding_VM, decoder._layers, decoder._norm_M, decoder._head)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(parts)}.values())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [tensor for field in fields(value) for tensor in _tensors(getattr(value, field.name))]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
