"""Qwen3: query and key heads are normalised, and their size is a setting of its own."""

from __future__ import annotations

from twinpool.engine.decoder_config import DecoderConfig, FamilyDefaults, qwen_windows, read_decoder_config
from twinpool.engine.model_config import ModelConfig

ARCHITECTURE = "Qwen3ForCausalLM"


def describe(config: ModelConfig) -> DecoderConfig:
    biased = config.flag("attention_bias", False)
    return read_decoder_config(
        config,
        FamilyDefaults(max_tokens=32768, num_kv_heads=32, head_dim=128),
        windows=qwen_windows(config),
        qkv_bias=biased,
        out_bias=biased,
        head_norms=True,
    )
