"""KVLayout: bytes by the formula 2 x layers x kv_heads x head_dim x element size."""

from __future__ import annotations

import pytest

from twinpool.core.layout import KVLayout

# Llama-3.1-8B: 128 KiB a token in bf16, 0.5 GiB for 4,096 tokens, a number often published for it.
LLAMA_8B = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
# SmolLM2-135M in fp32: 30 x 2 x 3 x 64 x 4.
SMOLLM2 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16, dtype="float32")


def test_token_bytes_equal_the_hand_formula() -> None:
    assert LLAMA_8B.token_bytes == 131_072
    assert LLAMA_8B.token_bytes * 4096 == 536_870_912
    assert SMOLLM2.token_bytes == 46_080
    assert SMOLLM2.rank_block_bytes == 737_280
    assert SMOLLM2.layer_token_bytes == 1_536


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (4096, 256)])
def test_blocks_are_rounded_up(tokens: int, blocks: int) -> None:
    assert LLAMA_8B.num_blocks(tokens) == blocks
