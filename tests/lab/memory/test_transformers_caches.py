"""What small models keep in the caches of transformers is what the planner reads of them, to the element."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twinpool.lab.memory.cache_format import FORMATS
from twinpool.lab.memory.cache_shape import CacheSettings
from twinpool.lab.memory.planned_model import model_of

TOKENS = 7
SETTINGS = CacheSettings(form=FORMATS["float32"], dtype="float32", block_tokens=1)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA_2 = {**MAMBA, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "falcon": {"multi_query": True},
    "mamba": {"state_size": 8, "conv_kernel": 4, "expand": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "conv_kernel": 4, "expand": 2},
    "jamba": {**MAMBA, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 2},
    "bamba": {**MAMBA_2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA_2, "mamba_d_ssm": 64, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "head_dim": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "qwen3_next": {**DELTA_NET, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_keeps_what_transformers_keeps(family: str) -> None:
    """A convolution keeps its last k inputs there, and the k - 1 that are still seen here."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        output = model(torch.arange(3, 3 + TOKENS)[None], use_cache=True)
    cache = output.cache_params if "cache_params" in output else output.past_key_values
    kernel = FAMILIES[family].get("conv_L_cache", 4)

    shape = model_of(config.to_dict()).shape
    states = [layer.state for layer in shape.layers if layer.state is not None]

    kept = {name: _elements(cache, name) for name in ("keys", "values", "conv_states", "recurrent_states")}
    assert sum(state.recurrent_elements for state in states) == kept["recurrent_states"]
    assert sum(state.conv_elements for state in states) * kernel == kept["conv_states"] * (kernel - 1)
    kv_bytes = shape.conversation_bytes(TOKENS, SETTINGS) - shape.state_bytes(SETTINGS)
    assert kv_bytes == 4 * (kept["keys"] + kept["values"])


def _elements(cache: Any, name: str) -> int:
    held = [getattr(layer, name, None) for layer in cache.layers]
    lists = [value.values() if isinstance(value, dict) else [value] for value in held]
    return sum(tensor.numel() for tensors in lists for tensor in tensors if isinstance(tensor, torch.Tensor))
