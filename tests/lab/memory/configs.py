"""The fields of public config.json files that decide what a model keeps, by hub id."""

from __future__ import annotations

from typing import Any


def _llama(layers: int, model: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": model,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 4 * model,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        **more,
    }


def _deepseek(layers: int, model: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        **_llama(layers, model, heads, heads, model_type="deepseek_v3"),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        **more,
    }


LLAMA_2_7B = _llama(32, 4096, 32, 32, intermediate_size=11008)
LLAMA_31_8B = _llama(32, 4096, 32, 8, intermediate_size=14336, vocab_size=128256)
OPT_13B = {
    "model_type": "opt",
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "ffn_dim": 20480,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "opt-13b": OPT_13B,
    "opt-66b": {**OPT_13B, "num_hidden_layers": 64, "hidden_size": 9216, "num_attention_heads": 72},
    "bloom-176b": {
        "model_type": "bloom",
        "n_layer": 70,
        "hidden_size": 14336,
        "n_head": 112,
        "vocab_size": 250880,
    },
    "Llama-2-7b-hf": LLAMA_2_7B,
    "Llama-2-70b-hf": _llama(80, 8192, 64, 8),
    "Meta-Llama-3.1-8B": LLAMA_31_8B,
    "Meta-Llama-3.1-70B": _llama(80, 8192, 64, 8, vocab_size=128256),
    "Llama-3.2-1B": _llama(16, 2048, 32, 8, head_dim=64),
    "Llama-3.2-3B": _llama(28, 3072, 24, 8, head_dim=128),
    "Qwen-72B": {
        "model_type": "qwen",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "kv_channels": 128,
        "vocab_size": 152064,
    },
    "Qwen2.5-72B": _llama(
        80, 8192, 64, 8, model_type="qwen2", use_sliding_window=False, sliding_window=131072
    ),
    "Qwen3-8B": _llama(36, 4096, 32, 8, model_type="qwen3", head_dim=128, use_sliding_window=False),
    "Qwen3-32B": _llama(64, 5120, 64, 8, model_type="qwen3", head_dim=128, sliding_window=None),
    "Qwen3-30B-A3B": _llama(
        48, 2048, 32, 4, model_type="qwen3_moe", head_dim=128, num_experts=128, use_sliding_window=False
    ),
    "Mistral-7B-v0.1": _llama(32, 4096, 32, 8, model_type="mistral", sliding_window=4096),
    "Mixtral-8x7B-v0.1": _llama(
        32, 4096, 32, 8, model_type="mixtral", sliding_window=None, num_local_experts=8
    ),
    "falcon-7b": {
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": False,
        "vocab_size": 65024,
    },
    "gemma-2-2b": _llama(26, 2304, 8, 4, model_type="gemma2", head_dim=256, sliding_window=4096),
    "gpt-oss-20b": _llama(
        24,
        2880,
        64,
        8,
        model_type="gpt_oss",
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
    ),
    "DeepSeek-V2": _deepseek(60, 5120, 128, model_type="deepseek_v2"),
    "": _deepseek(61, 7168, 128),  # DeepSeek-V3 and R1
    "Kimi-K2": _deepseek(61, 7168, 64),
    "Qwen3-Next-80B-A3B": _llama(
        48,
        2048,
        16,
        2,
        model_type="qwen3_next",
        head_dim=256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    "Jamba-v0.1": _llama(
        32,
        4096,
        32,
        8,
        model_type="jamba",
        sliding_window=None,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
    ),
    "mamba-2.8b": {
        "model_type": "mamba",
        "num_hidden_layers": 64,
        "hidden_size": 2560,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "vocab_size": 50280,
    },
}
