"""The planner's arithmetic against published numbers; each row names where its numbers come from.

Where the collection of vectors lies beside the checkout its numbers are compared too, and none is left out.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.memory.configs import CONFIGS, LLAMA_2_7B, LLAMA_31_8B, OPT_13B
from tests.shared import vectors
from twinpool.lab.memory.cache_format import FORMATS
from twinpool.lab.memory.cache_shape import CacheSettings, CacheShape
from twinpool.lab.memory.capacity import Capacity
from twinpool.lab.memory.layer import Layer, LayerKV
from twinpool.lab.memory.planned_model import model_of

TOKENS = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", block_tokens=1)
BLOCKS = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", block_tokens=16)
COLLECTED = vectors()

# Name, source, bytes per token of layers that see everything and of those with a window, and of states.
MODELS = [
    ("opt-13b", "PagedAttention, arXiv 2309.06180, section 3: 800 KB", 819200, 0, 0),
    ("opt-66b", "DistServe, arXiv 2401.09670, section 3.3: 1.13 GB for 512 tokens", 2359296, 0, 0),
    ("bloom-176b", "splitwise-sim, architectures/bloom-176b.yaml", 4014080, 0, 0),
    ("Llama-2-7b-hf", "vidur, config/model_config.py", 524288, 0, 0),
    ("Llama-2-70b-hf", "vidur, config/model_config.py", 327680, 0, 0),
    ("Meta-Llama-3.1-8B", "aiconfigurator 0.12.0, model_configs", 131072, 0, 0),
    ("Meta-Llama-3.1-70B", "Mooncake, FAST 25, section 5.3.1: 320 KB", 327680, 0, 0),
    ("Llama-3.2-1B", "GenZ-LLM 0.0.16, meta.py", 32768, 0, 0),
    ("Llama-3.2-3B", "GenZ-LLM 0.0.16, meta.py", 114688, 0, 0),
    ("Qwen-72B", "vidur, config/model_config.py", 2621440, 0, 0),
    ("Qwen2.5-72B", "DeepSeek-V3, ISCA 25: 327.680 KB", 327680, 0, 0),
    ("Qwen3-8B", "aiconfigurator 0.12.0, model_configs", 147456, 0, 0),
    ("Qwen3-32B", "aiconfigurator 0.12.0; heads are not hidden / heads", 262144, 0, 0),
    ("Qwen3-30B-A3B", "InferSim, README: 96.00 KB", 98304, 0, 0),
    ("Mistral-7B-v0.1", "transformers 5.24, MistralConfig", 0, 131072, 0),
    ("Mixtral-8x7B-v0.1", "Jamba paper, arXiv 2403.19887: 32 GB at 256K", 131072, 0, 0),
    ("falcon-7b", "transformers 5.24, FalconConfig: multi-query", 8192, 0, 0),
    ("gemma-2-2b", "transformers 5.24, Gemma2Config", 53248, 53248, 0),
    ("gpt-oss-20b", "aiconfigurator 0.12.0, model_configs", 24576, 24576, 0),
    ("DeepSeek-V2", "DeepSeek-V2, arXiv 2405.04434: 512 + 64 elements, 60 layers", 69120, 0, 0),
    ("", "DeepSeek-V3, ISCA 25: 70.272 KB", 70272, 0, 0),
    ("Kimi-K2", "aiconfigurator 0.12.0, model_configs", 70272, 0, 0),
    ("Qwen3-Next-80B-A3B", "InferSim, kvcache.get_states_size", 24576, 0, 77266944),
    ("Jamba-v0.1", "Jamba paper, arXiv 2403.19887: 4 GB of KV at 256K", 16384, 0, 16056320),
    ("mamba-2.8b", "transformers 5.24, MambaConfig: expand 2, state 16, convolution 4", 0, 0, 22937600),
]


@pytest.mark.parametrize(("name", "source", "endless", "windowed", "state"), MODELS)
def test_a_model_keeps_the_published_bytes_per_token(
    name: str, source: str, endless: int, windowed: int, state: int
) -> None:
    shape = model_of(CONFIGS[name]).shape

    assert shape.unbounded_token_bytes(TOKENS) == endless, source
    assert shape.token_bytes(TOKENS) - endless == windowed, source
    assert shape.state_bytes(TOKENS) == state, source


@pytest.mark.parametrize(
    "vector", [v for v in COLLECTED.values() if v["topic"] == "kv-model"], ids=lambda v: v["id"]
)
def test_a_conversation_of_every_length_takes_the_collected_bytes(vector: dict[str, Any]) -> None:
    shape = model_of(CONFIGS[vector["id"].removeprefix("kv-model-")]).shape
    lengths = {
        key: int(key.removeprefix("bytes_T")) for key in vector["expected"] if key.startswith("bytes_T")
    }

    found = {key: shape.conversation_bytes(length, TOKENS) for key, length in lengths.items()}

    assert found == {key: vector["expected"][key] for key in lengths}, vector["source"]
    assert len(found) == 5


@pytest.mark.parametrize(
    ("layers", "batch", "tokens", "kv_heads", "size"),
    [
        (32, 1, 4096, 8, 536870912),  # kv-seed-1: 0.5 GiB
        (32, 4, 8192, 8, 4294967296),  # kv-seed-2: 4 GiB
        (32, 4, 8192, 4, 2147483648),  # kv-seed-3: 2 GiB
        (32, 1, 4096, 32, 2147483648),  # kv-seed-4: 2 GiB
    ],
)
def test_kv_is_two_times_layers_heads_dim_tokens_and_element(
    layers: int, batch: int, tokens: int, kv_heads: int, size: int
) -> None:
    shape = _plain(layers, kv_heads)

    assert (
        batch * shape.conversation_bytes(tokens, BLOCKS)
        == size
        == 2 * layers * batch * tokens * kv_heads * 256
    )


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [(1, 1), (16, 1), (17, 2), (4096, 256)],  # kv-paged-*: blocks of 16 tokens of 131072 bytes
)
def test_a_conversation_takes_whole_blocks(tokens: int, blocks: int) -> None:
    shape = _plain(32, 8)

    assert shape.conversation_bytes(tokens, BLOCKS) == blocks * 16 * 131072


@pytest.mark.parametrize(
    ("ranks", "heads", "of_rank", "of_all"),
    [(1, 8, 131072, 131072), (4, 2, 32768, 131072), (8, 1, 16384, 131072), (16, 1, 16384, 262144)],
)
def test_ranks_keep_at_least_one_head_each(ranks: int, heads: int, of_rank: int, of_all: int) -> None:
    """kv-tp-8-*: max(1, heads / ranks), as in vLLM and aiconfigurator; of 16 ranks two keep the same head."""
    shape = _plain(32, 8)
    settings = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", num_ranks=ranks)

    assert shape.kv_layers[0].rank_heads(ranks) == heads
    assert shape.token_bytes(settings) == of_rank
    assert shape.token_bytes(settings) * ranks == of_all


def test_a_head_that_eight_ranks_keep_twice_is_moved_twice() -> None:
    """Mooncake's SGLang page: 12.62 GB for 32768 tokens of Qwen3-235B (4 KV heads) on 8 ranks."""
    shape = _plain(94, 4)
    settings = CacheSettings(form=FORMATS["bfloat16"], dtype="bfloat16", num_ranks=8)

    assert round(8 * 32768 * shape.token_bytes(settings) / 1e9, 2) == 12.62


def test_fp8_keeps_its_scales_per_layer_and_int8_per_row() -> None:
    """kv-q-fp8 and kv-q-int8-head: 32 layers, 8 heads of 128; int8 with a float16 scale and zero point."""
    shape = _plain(32, 8)
    fp8, int8 = (CacheSettings(form=FORMATS[name], dtype="bfloat16") for name in ("fp8", "int8"))

    assert shape.token_bytes(fp8) == 65536
    assert shape.scale_bytes(fp8) == 32 * 2 * 4
    assert shape.token_bytes(int8) == 67584
    assert shape.scale_bytes(int8) == 0


def test_twelve_gib_hold_the_tokens_of_the_vllm_paper() -> None:
    """cap-vllm-paper-13b: table 1 of arXiv 2309.06180 says 15.7K slots for OPT-13B, within 1 %."""
    capacity = Capacity(shape=model_of(OPT_13B).shape, settings=BLOCKS, cache_bytes=12 * 2**30)

    assert capacity.num_tokens == 15728
    assert capacity.num_tokens == pytest.approx(15700, rel=0.01)


def test_blocks_of_a_vllm_log_hold_the_sequences_that_it_says() -> None:
    """cap-vllm-13596: vLLM PR 13596 logs 127626 blocks of 16 tokens, and 997.08 sequences of 2048 tokens."""
    shape = _plain(32, 8)
    capacity = Capacity(shape=shape, settings=BLOCKS, cache_bytes=127626 * shape.block_bytes(BLOCKS))

    assert capacity.num_tokens == 2042016
    assert capacity.num_tokens / 2048 == pytest.approx(997.08, abs=0.01)
    assert capacity.conversations(2048) == 997


@pytest.mark.parametrize(
    ("config", "parameters"),
    # w-Llama-2-7B and w-Llama-3.1-8B: V*h*2 + L*(2*h*Hq*D + 2*h*Hkv*D + 3*h*m + 2h) + h
    [(LLAMA_2_7B, 6738415616), (LLAMA_31_8B, 8030261248)],
)
def test_weights_are_counted_to_the_last_parameter(config: dict[str, Any], parameters: int) -> None:
    term = model_of(config).weights(dtype="bfloat16", num_ranks=1)

    assert term.num_bytes == 2 * parameters
    assert term.kind == "exact"


@pytest.mark.skipif(not COLLECTED, reason="the collection of vectors is not here")
def test_no_collected_vector_of_memory_is_left_out() -> None:
    collected = {name for name in COLLECTED if name.startswith(("kv", "w-", "cap"))}
    models = {f"kv-model-{name}" for name, *_ in MODELS}
    here = {
        *(f"kv-seed-{number}" for number in (1, 2, 3, 4)),
        *(f"kv-paged-{tokens}-16" for tokens in (1, 16, 17, 4096)),
        *(f"kv-tp-8-{ranks}" for ranks in (1, 4, 8, 16)),
        *(
            "kv-q-fp8",
            "kv-q-int8-head",
            "cap-vllm-paper-13b",
            "cap-vllm-13596",
            "w-Llama-2-7B",
            "w-Llama-3.1-8B",
        ),
    }

    assert models | here == collected
    for name, _, endless, windowed, state in MODELS:
        expected = COLLECTED[f"kv-model-{name}"]["expected"]
        assert expected["bytes_per_token_unbounded_layers"] == endless
        assert expected["bytes_per_token_windowed_layers"] == windowed
        assert expected["bytes_per_token_short_context"] == endless + windowed
        assert expected["state_bytes_per_sequence"] == state


def _plain(layers: int, kv_heads: int) -> CacheShape:
    """Heads of 128, as many in each layer."""
    return CacheShape((Layer(kv=LayerKV(num_heads=kv_heads, rows=(128, 128))),) * layers)
