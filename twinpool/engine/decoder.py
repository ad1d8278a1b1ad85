"""The one decoder that all families share: norm, attention, norm, gated feed-forward, layer after layer.

Knows tensors, not requests.  Numbers equal transformers' in float32.

Shapes: T tokens in the batch, R rows of them, M model dim, F inner dim, H query heads, K KV heads,
D head dim, V vocabulary, I the input of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from twinpool.engine.attention_kernel import AttentionKernel
from twinpool.engine.batch import Batch
from twinpool.engine.decoder_config import DecoderConfig
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.plan import LayerHook
from twinpool.engine.rope import Rope, rotate
from twinpool.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix of [out, in] with or without a bias of [out]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_RI: Tensor) -> Tensor:
        """Return [R, out].  Two or three rows go to a CPU's GEMM as columns: up to twice as fast."""
        if not (x_RI.is_cpu and 2 <= x_RI.shape[0] <= 3):
            return linear(x_RI, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(self.weight, x_RI.t()).t().contiguous()
        return torch.addmm(self.bias[:, None], self.weight, x_RI.t()).t().contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one layer."""

    attention_norm_M: Tensor
    query: Linear
    key: Linear
    value: Linear
    query_norm_D: Tensor | None
    key_norm_D: Tensor | None
    out: Linear
    feed_forward_norm_M: Tensor
    gate: Linear
    up: Linear
    down: Linear


class Decoder:
    """A decoder with its weights.

    Args:
        config: Its numbers.
        weights: Where its tensors are taken from.
        device: Where it computes.
        dtype: Of weights, keys, values and everything between.

    Raises:
        ModelError: A weight is missing, has another shape, or has no use.
    """

    def __init__(
        self, config: DecoderConfig, weights: Weights, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self._rope = Rope(config.rope, device=device, dtype=dtype)
        self._embedding_VM = weights.take("model.embed_tokens.weight", config.vocab_size, config.model_dim)
        self._layers = [_layer_weights(config, weights, layer) for layer in range(config.num_layers)]
        self._norm_M = weights.take("model.norm.weight", config.model_dim)
        self._head = Linear(_head(config, weights, self._embedding_VM), None)
        weights.drop(".rotary_emb.inv_freq")  # written by old releases, recomputed by all
        weights.finish()

    def forward(
        self, batch: Batch, cache: KVCache, attention: AttentionKernel, on_layer: LayerHook | None
    ) -> Tensor:
        """Compute all tokens of a batch and store their keys and values.

        Args:
            batch: The tokens.
            cache: Read up to each token, written at it.
            attention: How attention is computed.
            on_layer: Called with each layer's index once its keys and values are stored.

        Returns:
            [T, M], before the last norm.
        """
        config = self.config
        prepared = {window: attention.prepare(batch, window=window) for window in set(config.windows)}
        cos_T1D, sin_T1D = self._rope.angles(batch.positions_T)
        hidden_TM = embedding(batch.token_ids_T, self._embedding_VM)
        for layer, (weights, window) in enumerate(zip(self._layers, config.windows, strict=True)):
            x_TM = self._norm(hidden_TM, weights.attention_norm_M)
            q_THD = weights.query(x_TM).view(-1, config.num_heads, config.head_dim)
            k_TKD = weights.key(x_TM).view(-1, config.num_kv_heads, config.head_dim)
            v_TKD = weights.value(x_TM).view(-1, config.num_kv_heads, config.head_dim)
            if weights.query_norm_D is not None and weights.key_norm_D is not None:
                q_THD = self._norm(q_THD, weights.query_norm_D)
                k_TKD = self._norm(k_TKD, weights.key_norm_D)
            q_THD, k_TKD = rotate(q_THD, cos_T1D, sin_T1D), rotate(k_TKD, cos_T1D, sin_T1D)
            cache.store(layer, batch.slots_T, k_TKD, v_TKD)
            if on_layer is not None:
                on_layer(layer)
            attended = prepared[window].attend(q_THD, k_TKD, v_TKD, cache.slots(layer))
            hidden_TM = hidden_TM + weights.out(attended)
            x_TM = self._norm(hidden_TM, weights.feed_forward_norm_M)
            gated_TF = silu(weights.gate(x_TM)).mul_(weights.up(x_TM))
            hidden_TM = hidden_TM + weights.down(gated_TF)
        return hidden_TM

    def logits(self, hidden_RM: Tensor) -> Tensor:
        """Return [R, V] in float32 for rows of what ``forward`` returned."""
        return self._head(self._norm(hidden_RM, self._norm_M)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.norm_epsilon)


def _layer_weights(config: DecoderConfig, weights: Weights, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    model, inner = config.model_dim, config.inner_dim
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(name: str, rows: int, columns: int, *, biased: bool) -> Linear:
        weight = weights.take(f"{prefix}.{name}.weight", rows, columns)
        return Linear(weight, weights.take(f"{prefix}.{name}.bias", rows) if biased else None)

    def head_norm(name: str) -> Tensor | None:
        return weights.take(f"{prefix}.{name}.weight", config.head_dim) if config.head_norms else None

    return LayerWeights(
        attention_norm_M=weights.take(f"{prefix}.input_layernorm.weight", model),
        query=matrix("self_attn.q_proj", queries, model, biased=config.qkv_bias),
        key=matrix("self_attn.k_proj", keys, model, biased=config.qkv_bias),
        value=matrix("self_attn.v_proj", keys, model, biased=config.qkv_bias),
        query_norm_D=head_norm("self_attn.q_norm"),
        key_norm_D=head_norm("self_attn.k_norm"),
        out=matrix("self_attn.o_proj", model, queries, biased=config.out_bias),
        feed_forward_norm_M=weights.take(f"{prefix}.post_attention_layernorm.weight", model),
        gate=matrix("mlp.gate_proj", inner, model, biased=config.feed_forward_bias),
        up=matrix("mlp.up_proj", inner, model, biased=config.feed_forward_bias),
        down=matrix("mlp.down_proj", model, inner, biased=config.feed_forward_bias),
    )


def _head(config: DecoderConfig, weights: Weights, embedding_VM: Tensor) -> Tensor:
    """Return the output matrix.  A tied model may bring a second copy; a copy that differs is used."""
    if config.tied and "lm_head.weight" not in weights:
        return embedding_VM
    head_VM = weights.take("lm_head.weight", config.vocab_size, config.model_dim)
    return embedding_VM if config.tied and torch.equal(head_VM, embedding_VM) else head_VM
