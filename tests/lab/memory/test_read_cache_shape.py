"""What a model keeps is read from its config.json, in whatever words; what cannot be read is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.memory.configs import CONFIGS, LLAMA_31_8B
from twinpool.core.errors import ConfigError, ModelError
from twinpool.engine.model_config import ModelConfig
from twinpool.lab.memory.cache_format import FORMATS, cache_format
from twinpool.lab.memory.cache_shape import CacheSettings, CacheShape
from twinpool.lab.memory.layer_kind import LayerKind, layer_kinds
from twinpool.lab.memory.model_fields import ModelFields
from twinpool.lab.memory.planned_model import model_of
from twinpool.lab.memory.read_cache_shape import read_cache_shape

TOKENS = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", block_tokens=1)
BLOCKS = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", block_tokens=16)


def read(name: str, **changes: Any) -> CacheShape:
    return read_cache_shape(ModelConfig({**CONFIGS[name], **changes}))


@pytest.mark.parametrize(
    ("family", "drops"),
    [
        ("gemma2", True),
        ("gemma3_text", True),
        ("cohere2", True),
        ("olmo3", True),
        ("exaone4", True),
        ("gpt_oss", True),
        ("llama4_text", True),
        ("gemma3n_text", False),
        ("jamba", False),
        ("minimax", False),
        ("kimi_linear", False),
        ("mimo_v2_flash", False),
        ("zamba2", False),
    ],
)
def test_the_kinds_of_layers_are_those_of_transformers(family: str, drops: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family)
    written = config.to_dict()
    if drops:  # as in config.json files of before that field
        del written["layer_types"]

    kinds = layer_kinds(ModelFields(ModelConfig(written)))

    names = [name.replace("chunked", "sliding") for name in config.layer_types]
    assert [str(kind) for kind in kinds] == names


def test_an_interval_a_pattern_and_a_list_say_the_same() -> None:
    """Qwen3-Next: every fourth of 48 layers attends."""
    names = ["linear_attention"] * 3 + ["full_attention"]
    by_interval = read("Qwen3-Next-80B-A3B")
    by_list = read("Qwen3-Next-80B-A3B", full_attention_interval=None, layer_types=names * 12)

    assert by_interval == by_list
    assert len(by_interval.kv_layers) == 12


def test_nemotron_letters_are_layers() -> None:
    """Nemotron-H: M is Mamba-2, * attends, - is a feed-forward part."""
    fields = ModelFields(
        ModelConfig({"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-"})
    )

    assert layer_kinds(fields) == (LayerKind.STATE, LayerKind.NOTHING, LayerKind.FULL, LayerKind.NOTHING)


def test_layers_that_read_the_kv_of_others_keep_none() -> None:
    """Gemma 3n: the last 15 of 35 layers; Hunyuan: every second one."""
    last = read("Llama-2-7b-hf", num_kv_shared_layers=12)
    second = read("Llama-2-7b-hf", use_cla=True, cla_share_factor=2)

    assert last.token_bytes(TOKENS) == 20 * 2 * 32 * 128 * 2
    assert second.token_bytes(TOKENS) == 16 * 2 * 32 * 128 * 2


def test_a_window_lies_over_one_block_more_than_it_fills() -> None:
    """gpt-oss: 12 layers see 128 tokens, which lie in 9 blocks of 16 unless they begin with a block."""
    shape = read("gpt-oss-20b")
    token_bytes = 2 * 8 * 64 * 2

    assert shape.conversation_bytes(100_000, BLOCKS) == 12 * token_bytes * (100_000 + 144)
    assert shape.conversation_bytes(40, BLOCKS) == 24 * token_bytes * 48
    assert shape.unwindowed().conversation_bytes(100_000, BLOCKS) == 24 * token_bytes * 100_000


def test_a_latent_is_kept_whole_by_every_rank_and_a_state_is_shared() -> None:
    four = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", num_ranks=4)

    assert read("").token_bytes(four) == 61 * 576 * 2
    assert read("Jamba-v0.1").state_bytes(four) == 16056320 // 4


def test_a_model_that_sees_is_read_by_its_language_part() -> None:
    text = {**CONFIGS["gemma-2-2b"], "model_type": "gemma3_text"}
    del text["num_attention_heads"], text["num_key_value_heads"]  # as Gemma 3 leaves them out
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"num_hidden_layers": 27}}

    shape = read_cache_shape(ModelConfig(config))

    assert len(shape.kv_layers) == 26
    assert sum(kv.window is None for kv in shape.kv_layers) == 4  # every sixth


def test_heads_may_differ_from_layer_to_layer() -> None:
    """OpenELM and models pruned by search list the KV heads of each layer."""
    shape = read("Llama-3.2-1B", num_key_value_heads=[1, 2] * 8)

    assert shape.token_bytes(TOKENS) == 8 * (1 + 2) * 2 * 64 * 2


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("Llama-2-7b-hf", {"num_hidden_layers": None}, "num_hidden_layers: is missing"),
        ("Llama-2-7b-hf", {"num_hidden_layers": 0}, "num_hidden_layers: 0 is no whole number above 0"),
        ("Llama-2-7b-hf", {"hidden_size": "wide"}, "hidden_size: 'wide' is no whole number above 0"),
        ("Llama-2-7b-hf", {"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide 32 heads"),
        (
            "Llama-2-7b-hf",
            {"num_attention_heads": 31, "num_key_value_heads": 31},
            "num_attention_heads: 31 does",
        ),
        ("Llama-2-7b-hf", {"num_key_value_heads": [1, 2]}, r"num_key_value_heads: \[1, 2\] is no list of 32"),
        ("Llama-2-7b-hf", {"is_encoder_decoder": True}, "is_encoder_decoder: models with an encoder are not"),
        ("Llama-2-7b-hf", {"num_kv_shared_layers": 32}, "num_kv_shared_layers: 32 of 32 layers leave none"),
        (
            "Llama-2-7b-hf",
            {"mamba_d_state": 16},
            "mamba_d_state: which layers of llama have states is unknown",
        ),
        (
            "gpt-oss-20b",
            {"layer_types": ["full_attention"]},
            "num_hidden_layers: 24 layers, but 1 are described",
        ),
        ("gpt-oss-20b", {"layer_types": ["magic"] * 24}, r"layer_types\[0\]: 'magic' is none of"),
        ("gpt-oss-20b", {"sliding_window": None}, "sliding_window: is missing"),
        ("Jamba-v0.1", {"attn_layer_offset": 8}, r"attn_layer_offset: 8 is not in \[0, 8\)"),
        ("Jamba-v0.1", {"mamba_d_conv": None}, "mamba_d_conv: is missing"),
        ("Qwen3-Next-80B-A3B", {"linear_key_head_dim": None}, "linear_key_head_dim: is missing"),
        ("DeepSeek-V2", {"qk_rope_head_dim": None}, "qk_rope_head_dim: is missing"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_by_its_field(
    name: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=f"^--model: config.json: {problem}"):
        read(name, **changes)


@pytest.mark.parametrize(
    ("name", "ranks", "problem"),
    [
        ("Llama-2-70b-hf", 3, "3 ranks and 8 KV heads do not divide each other"),
        ("Qwen3-Next-80B-A3B", 32, "32 ranks do not divide 16 states"),
    ],
)
def test_ranks_that_cannot_share_are_refused(name: str, ranks: int, problem: str) -> None:
    settings = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", num_ranks=ranks)

    with pytest.raises(ConfigError, match=f"^tensor_parallel: {problem}"):
        read(name).conversation_bytes(1, settings)


def test_a_format_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="--cache-format: 'fp3' is none of float32, bfloat16, float16, fp8"):
        cache_format("fp3", field="--cache-format")


def test_our_layout_and_the_plan_agree_on_every_rank() -> None:
    from twinpool.core.layout import KVLayout

    for ranks in (1, 2, 8, 16):
        layout = KVLayout(
            num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16", tp_size=ranks
        )
        settings = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", num_ranks=ranks)

        assert model_of(LLAMA_31_8B).shape.block_bytes(settings) == layout.rank_block_bytes
