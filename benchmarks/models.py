"""The models that benchmarks run: a small real one, and a made-up one with much KV for little arithmetic."""

from __future__ import annotations

import random
from pathlib import Path

from tests.checkpoints_toy import make_checkpoint
from twinpool.checkpoints.resolve import resolve_model

VOCABULARY = 262  # ids below it exist in both


def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct: 46,080 bytes of KV per token in fp32."""
    return resolve_model("smollm2-135m-instruct", progress=print)


def wide_kv(folder: Path) -> Path:
    """Write a model with the KV of one of 8B, 131,072 bytes per token in bf16, and few weights."""
    return make_checkpoint(
        folder,
        "llama",
        dtype="bfloat16",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
    )


def prompt(num_tokens: int, *, seed: int) -> tuple[int, ...]:
    """Return ids at random, without those below 3, which end answers in many models."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCABULARY) for _ in range(num_tokens))
