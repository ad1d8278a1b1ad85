"""Llama and what copies it (SmolLM2, Yi, Vicuna): the plain decoder, with optional biases."""

from __future__ import annotations

from twinpool.engine.decoder_config import DecoderConfig, FamilyDefaults, read_decoder_config, same_window
from twinpool.engine.model_config import ModelConfig

ARCHITECTURE = "LlamaForCausalLM"


def describe(config: ModelConfig) -> DecoderConfig:
    biased = config.flag("attention_bias", False)
    return read_decoder_config(
        config,
        FamilyDefaults(max_tokens=2048),
        windows=same_window(config, None),
        qkv_bias=biased,
        out_bias=biased,
        feed_forward_bias=config.flag("mlp_bias", False),
    )
