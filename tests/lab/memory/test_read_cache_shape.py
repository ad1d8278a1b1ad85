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


def _plain(family: str, layers: int, model: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": model,
        "num_attention_heads": heads,
        **more,
    }


@pytest.mark.parametrize(
    ("config", "token_bytes"),  # layers x 2 x KV heads x head dim x 2 bytes
    [
        # Falcon-7B of 2023: 71 heads of 64 share one.
        (_plain("RefinedWebModel", 32, 4544, 71, multi_query=True), 32 * 2 * 1 * 64 * 2),
        # Falcon-40B of 2023: 128 heads of 64, 8 with KV.
        (_plain("RefinedWeb", 60, 8192, 128, n_head_kv=8), 60 * 2 * 8 * 64 * 2),
        (_plain("falcon", 60, 8192, 128, new_decoder_architecture=True, num_kv_heads=8), 60 * 2 * 8 * 64 * 2),
        (
            _plain("mpt", 32, 4096, 32, attn_config={"attn_type": "multiquery_attention"}),
            32 * 2 * 1 * 128 * 2,
        ),
        (
            _plain("mpt", 32, 4096, 32, attn_config={"attn_type": "multihead_attention"}),
            32 * 2 * 32 * 128 * 2,
        ),
        (_plain("dbrx", 40, 6144, 48, attn_config={"kv_n_heads": 8}), 40 * 2 * 8 * 128 * 2),
        # Step-3: 64 heads of 256 in one group.
        (_plain("step3_text", 61, 7168, 64, head_dim=256, num_attention_groups=1), 61 * 2 * 1 * 256 * 2),
        # DeciLM-7B lists the KV heads of each layer: here 4 and 1.
        (_plain("deci", 2, 4096, 32, num_key_value_heads_per_layer=[4, 1]), (4 + 1) * 2 * 128 * 2),
        # ChatGLM2-6B: 32 heads of 128 in two groups, where that is switched on.
        *(
            (
                _plain(
                    "chatglm",
                    *(28, 4096, 32),
                    kv_channels=128,
                    multi_query_group_num=2,
                    multi_query_attention=is_on,
                ),
                28 * 2 * (2 if is_on else 32) * 128 * 2,
            )
            for is_on in (True, False)
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_kv_heads_are_read_in_the_words_of_each_family(config: dict[str, Any], token_bytes: int) -> None:
    assert read_cache_shape(ModelConfig(config)).token_bytes(TOKENS) == token_bytes


def test_flags_say_which_layers_have_a_window() -> None:
    """MiMo: 0 sees everything with 4 heads, 1 sees 128 tokens with 8; keys of 192 elements, values of 128."""
    shape = read_cache_shape(
        ModelConfig(
            _plain(
                "mimo_v2_flash",
                *(4, 4096, 64),
                num_key_value_heads=4,
                swa_num_key_value_heads=8,
                head_dim=192,
                v_head_dim=128,
                sliding_window=128,
                hybrid_layer_pattern=[0, 1, 1, 0],
            )
        )
    )

    assert shape.unbounded_token_bytes(TOKENS) == 2 * 4 * (192 + 128) * 2
    assert shape.token_bytes(TOKENS) == 2 * 4 * (192 + 128) * 2 + 2 * 8 * (192 + 128) * 2
    assert [kv.window for kv in shape.kv_layers] == [None, 128, 128, None]


@pytest.mark.parametrize("is_listed", [True, False])
def test_zamba_has_states_of_mamba_and_attention_beside_thirteen_of_them(is_listed: bool) -> None:
    """Zamba-7B-v1: 7424 channels; attention is 2 x 3712 wide.

    A state is 7424 x 3 elements of 2 bytes and 7424 x 16 of 4 bytes, in each of 76 layers.  Layer 2 and each
    whose number has the remainder 4 of 6 when counted from the third on attend: 2, 7, 13 ... 73.
    """
    config = _plain(
        "zamba",
        *(76, 3712, 16),
        num_key_value_heads=16,
        n_mamba_heads=2,
        attn_layer_period=6,
        attn_layer_offset=4,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
    )
    hybrid = [2, *range(7, 76, 6)]
    if is_listed:
        config["layers_block_type"] = ["hybrid" if layer in hybrid else "mamba" for layer in range(76)]

    shape = read_cache_shape(ModelConfig(config))

    assert shape.state_bytes(TOKENS) == 76 * (7424 * 3 * 2 + 7424 * 16 * 4) == 39_495_680
    assert shape.token_bytes(TOKENS) == 13 * 2 * 16 * 464 * 2 == 386_048
    assert [layer for layer, kept in enumerate(shape.layers) if kept.kv is not None] == hybrid


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (2, 1), (4, 2)])
def test_ranks_keep_the_groups_of_their_heads_whole(groups: int, kept: int) -> None:
    """Bamba-9B on two ranks: half of 8192 channels, and B and C of 128 elements for each group.

    29 of 32 layers have a state of 8192 x 128 elements in float32, and see 3 more inputs.
    """
    config = _plain(
        "bamba",
        *(32, 4096, 32),
        num_key_value_heads=8,
        attn_layer_indices=[9, 18, 27],
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=groups,
        mamba_d_conv=4,
    )
    two = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", num_ranks=2)

    found = read_cache_shape(ModelConfig(config)).state_bytes(two)

    assert found == 29 * ((4096 + 2 * kept * 128) * 3 * 2 + 4096 * 128 * 4)
    assert groups > 1 or found == 61_574_656


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
        *(
            ("Llama-2-7b-hf", {name: value}, f"{name}: changes what layers keep, and is not read")
            for name, value in (
                ("block_configs", [{"attention": {"no_op": True}}]),  # nemotron-nas
                ("attention_other_setting", {"num_attention_groups": 4}),  # Step-3.5
                ("cross_attention_layers", [3, 8]),  # Llama 3.2 Vision
                ("attention_types", [[["global", "local"], 16]]),  # GPT-Neo
                ("global_attn_every_n_layers", 3),  # ModernBERT
                ("layer_group_size", 8),  # Ring
            )
        ),
        *(
            ("Llama-2-7b-hf", {"model_type": family}, f"model_type: the states of {family} are not known")
            for family in ("rwkv", "rwkv6", "rwkv7", "retnet", "gla", "xlstm")
        ),
        (
            "Llama-2-7b-hf",
            {"num_hidden_layers": 10**12},
            "num_hidden_layers: 1000000000000 is more than 10000",
        ),
        ("Llama-2-7b-hf", {"num_hidden_layers": 10**18}, "num_hidden_layers: is more than 1000000000000"),
        ("Llama-2-7b-hf", {"hidden_size": 10**400}, "hidden_size: is more than 1000000000000"),
        (
            "gpt-oss-20b",
            {"layer_types": None, "sliding_window_pattern": ""},
            "sliding_window_pattern: '' is not made of L and G",
        ),
        (
            "Llama-2-7b-hf",
            {"attn_config": {"attn_type": "magic"}},
            "attn_config: attn_type: 'magic' is none of",
        ),
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
