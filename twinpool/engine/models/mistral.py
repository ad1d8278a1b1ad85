"""Mistral: every layer has the same sliding window, unless it is null."""

from __future__ import annotations

from twinpool.engine.decoder_config import DecoderConfig, FamilyDefaults, read_decoder_config, same_window
from twinpool.engine.model_config import ModelConfig

ARCHITECTURE = "MistralForCausalLM"


def describe(config: ModelConfig) -> DecoderConfig:
    if "layer_types" in config:
        raise config.error("layer_types", "mistral layers are all alike")
    switched_off = "sliding_window" in config.fields and "sliding_window" not in config
    return read_decoder_config(
        config,
        FamilyDefaults(max_tokens=131072, num_kv_heads=8),
        windows=same_window(config, None if switched_off else config.integer("sliding_window", 4096)),
    )
