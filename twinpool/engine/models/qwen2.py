"""Qwen2 and Qwen2.5: queries, keys and values have a bias; some layers may have a sliding window."""

from __future__ import annotations

from twinpool.engine.decoder_config import DecoderConfig, FamilyDefaults, qwen_windows, read_decoder_config
from twinpool.engine.model_config import ModelConfig

ARCHITECTURE = "Qwen2ForCausalLM"


def describe(config: ModelConfig) -> DecoderConfig:
    return read_decoder_config(
        config,
        FamilyDefaults(max_tokens=32768, num_kv_heads=32),
        windows=qwen_windows(config),
        qkv_bias=True,
    )
