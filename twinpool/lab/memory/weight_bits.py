"""How many bits a weight of a quantised checkpoint takes, as its quantization_config says.

The few weights that stay wider are not counted apart, so this is for estimates.

Source: quantization_config as transformers 5.24, compressed-tensors and TensorRT Model Optimizer write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from twinpool.engine.model_config import ModelConfig

# Scales included: one of 8 bits for 32 weights of mxfp4, for 16 of nvfp4.
_METHODS: Mapping[str, float] = MappingProxyType({"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25})
_MODELOPT: Mapping[str, float] = MappingProxyType({"FP8": 8.0, "NVFP4": 4.5, "W4A16_NVFP4": 4.5})
_MOST = 64


def weight_bits(quantization: ModelConfig) -> float:
    """Return the bits of a weight, with its part of the scales.

    Raises:
        ModelError: They are not known; the message names a way out.
    """
    method = quantization.text("quant_method", "unnamed")
    if method in _METHODS:
        return _METHODS[method]
    if method == "bitsandbytes":
        return 4.5 if quantization.flag("load_in_4bit", False) else 8.0
    if quantization.fields.get("config_groups"):
        return max(_group_bits(quantization))
    if "bits" in quantization:
        return _bits(quantization, "bits") + _scale(quantization, 32)  # float16 scale and zero point
    if method == "modelopt" and quantization.text("quant_algo", "") in _MODELOPT:
        return _MODELOPT[quantization.text("quant_algo")]
    raise quantization.error(
        "quant_method",
        f"how many bits {method!r} weights have is not known; in a folder with the checkpoint its tensors "
        "are counted",
    )


def _group_bits(quantization: ModelConfig) -> list[float]:
    """Return the bits of each group of layers, of which there is one as a rule."""
    groups = quantization.part("config_groups")
    parts = [] if groups is None else [groups.part(name) for name in groups.fields]
    weights = [None if part is None else part.part("weights") for part in parts]
    found = []
    for weight in weights:
        if weight is None:
            raise quantization.error(
                "config_groups", "how many bits the weights of each group have is missing"
            )
        is_float = weight.text("type", "int") == "float"  # whose small groups have a scale of 8 bits
        found.append(_bits(weight, "num_bits") + _scale(weight, 8 if is_float else 16))
    return found


def _bits(part: ModelConfig, name: str) -> int:
    bits = part.integer(name)
    if bits > _MOST:
        raise part.error(name, f"is more than {_MOST}")
    return bits


def _scale(part: ModelConfig, num_bits: int) -> float:
    group = part.fields.get("group_size")
    return num_bits / group if type(group) is int and group > 0 else 0.0
