"""From config.json to what each layer keeps."""

from __future__ import annotations

from dataclasses import replace

from twinpool.engine.model_config import ModelConfig
from twinpool.lab.memory.cache_shape import CacheShape
from twinpool.lab.memory.layer import Layer, LayerKV
from twinpool.lab.memory.layer_kind import LayerKind, layer_kinds, window_of
from twinpool.lab.memory.layer_state import read_conv, read_state
from twinpool.lab.memory.model_fields import ModelFields

_ATTENDS = (LayerKind.FULL, LayerKind.WINDOW, LayerKind.HYBRID)


def read_cache_shape(config: ModelConfig) -> CacheShape:
    """Read the layers of a model.

    Raises:
        ModelError: A field is missing, does not fit the others, or asks for what is not planned.
    """
    fields = ModelFields(config)
    kinds = layer_kinds(fields)
    attends = [kind in _ATTENDS for kind in kinds]
    kv = _kv_layers(fields, kinds) if any(attends) else (None,) * len(kinds)
    state = read_state(fields) if LayerKind.STATE in kinds or LayerKind.HYBRID in kinds else None
    conv = read_conv(fields) if LayerKind.CONV in kinds else None
    states = {LayerKind.STATE: state, LayerKind.HYBRID: state, LayerKind.CONV: conv}
    layers = [
        Layer(kv=own if is_attention else None, state=states.get(kind))
        for kind, own, is_attention in zip(kinds, kv, attends, strict=True)
    ]
    return CacheShape(tuple(_shared(fields, layers)))


def _kv_layers(fields: ModelFields, kinds: tuple[LayerKind, ...]) -> tuple[LayerKV | None, ...]:
    if "kv_lora_rank" in fields.config:
        return (_latent(fields),) * len(kinds)
    window = window_of(fields) if LayerKind.WINDOW in kinds else None
    return tuple(
        _attention(fields, kind, heads, window) for kind, heads in zip(kinds, fields.kv_heads(), strict=True)
    )


def _latent(fields: ModelFields) -> LayerKV:
    """MLA keeps one latent and one rotated key for all heads: no factor 2, no heads, the same on each rank.

    Source:
        DeepSeek-V2 (arXiv 2405.04434), section 2.1.3: d_c + d_h^R elements per token and layer.
    """
    latent = fields.config.integer("kv_lora_rank") + fields.config.integer("qk_rope_head_dim")
    index = fields.config.integer("index_head_dim") if "index_head_dim" in fields.config else None
    return LayerKV(num_heads=1, rows=(latent,) if index is None else (latent, index))


def _attention(fields: ModelFields, kind: LayerKind, heads: int, window: int | None) -> LayerKV:
    config, head_dim = fields.config, fields.head_dim()
    if kind is LayerKind.WINDOW:
        heads = config.integer("swa_num_key_value_heads", heads)  # MiMo
        head_dim = config.integer("swa_head_dim", head_dim)
        value_dim = config.integer("swa_v_head_dim", config.integer("v_head_dim", head_dim))
        return LayerKV(num_heads=heads, rows=(head_dim, value_dim), window=window)
    if "global_head_dim" in config:  # Gemma 4
        head_dim = config.integer("global_head_dim")
        heads = config.integer("num_global_key_value_heads", heads)
    return LayerKV(num_heads=heads, rows=(head_dim, config.integer("v_head_dim", head_dim)))


def _shared(fields: ModelFields, layers: list[Layer]) -> list[Layer]:
    """Take the KV away from layers that read the KV of another one."""
    config, num_layers = fields.config, len(layers)
    if "num_kv_shared_layers" in config and config.fields["num_kv_shared_layers"] != 0:  # Gemma 3n: the last
        shared = config.integer("num_kv_shared_layers")
        if shared >= num_layers:
            raise config.error("num_kv_shared_layers", f"{shared} of {num_layers} layers leave none with KV")
        readers = range(num_layers - shared, num_layers)
    elif config.flag("use_cla", False):  # Hunyuan: of each group the first has KV
        factor = config.integer("cla_share_factor", 2)
        return [
            replace(layer, kv=layer.kv if index % factor == 0 else None) for index, layer in enumerate(layers)
        ]
    else:
        return layers
    return [replace(layer, kv=None) if index in readers else layer for index, layer in enumerate(layers)]
