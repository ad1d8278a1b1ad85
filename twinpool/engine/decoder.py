"""The one decoder that all families share: norm, attention, norm, gated feed-forward, layer after layer.

Knows tensors, not requests.  Numbers equal transformers' in float32.  Of several ranks each computes with
its share of the weights; all of them hold the same sums between the parts of a layer.

Shapes: T tokens in the batch, R rows of them, M model dim, F inner dim, H query heads, K KV heads,
D head dim, V vocabulary, I the input of a matrix.  F, H and K are those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad, rms_norm, silu

from twinpool.engine.attention_kernel import AttentionKernel
from twinpool.engine.batch import Batch
from twinpool.engine.decoder_config import DecoderConfig
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.parallel import RankGroup
from twinpool.engine.plan import LayerHook
from twinpool.engine.rope import Rope, rotate
from twinpool.engine.share import Share, cut, share_of
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
    """A decoder with its weights, or one rank's share of it.

    Args:
        config: Its numbers.
        weights: Where its tensors are taken from.
        group: The ranks that compute together; all of them call ``forward`` and ``logits`` alike.
        device: Where it computes.
        dtype: Of weights, keys, values and everything between.

    Attributes:
        share: What this rank keeps.

    Raises:
        ModelError: A weight is missing, has another shape, or has no use.
        ConfigError: Heads and ranks do not divide.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        group: RankGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.share = share_of(config, rank=group.rank, size=group.size)
        self._group = group
        self._rope = Rope(config.rope, device=device, dtype=dtype)
        self._embedding_VM = _vocabulary_matrix(config, weights, "model.embed_tokens.weight", self.share)
        self._layers = [
            _layer_weights(config, weights, layer, self.share) for layer in range(config.num_layers)
        ]
        self._norm_M = weights.take("model.norm.weight", config.model_dim)
        self._head = Linear(_head(config, weights, self._embedding_VM, self.share), None)
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
        config, group = self.config, self._group
        prepared = {window: attention.prepare(batch, window=window) for window in set(config.windows)}
        cos_T1D, sin_T1D = self._rope.angles(batch.positions_T)
        hidden_TM = self._embed(batch.token_ids_T)
        for layer, (weights, window) in enumerate(zip(self._layers, config.windows, strict=True)):
            x_TM = self._norm(hidden_TM, weights.attention_norm_M)
            q_THD = weights.query(x_TM).view(-1, len(self.share.heads), config.head_dim)
            k_TKD = weights.key(x_TM).view(-1, len(self.share.kv_heads), config.head_dim)
            v_TKD = weights.value(x_TM).view(-1, len(self.share.kv_heads), config.head_dim)
            if weights.query_norm_D is not None and weights.key_norm_D is not None:
                q_THD = self._norm(q_THD, weights.query_norm_D)
                k_TKD = self._norm(k_TKD, weights.key_norm_D)
            q_THD, k_TKD = rotate(q_THD, cos_T1D, sin_T1D), rotate(k_TKD, cos_T1D, sin_T1D)
            cache.store(layer, batch.slots_T, k_TKD, v_TKD)
            if on_layer is not None:
                on_layer(layer)
            attended = prepared[window].attend(q_THD, k_TKD, v_TKD, cache.slots(layer))
            hidden_TM = hidden_TM + group.all_reduce(weights.out(attended))
            x_TM = self._norm(hidden_TM, weights.feed_forward_norm_M)
            gated_TF = silu(weights.gate(x_TM)).mul_(weights.up(x_TM))
            hidden_TM = hidden_TM + group.all_reduce(weights.down(gated_TF))
        return hidden_TM

    def logits(self, hidden_RM: Tensor) -> Tensor:
        """Return [R, V] in float32 for rows of what ``forward`` returned; ranks but 0 get a part of it."""
        part_RV = self._head(self._norm(hidden_RM, self._norm_M))
        if self._group.size == 1:
            return part_RV.float()
        shares = [
            cut(self.config.vocab_size, rank=rank, size=self._group.size) for rank in range(self._group.size)
        ]
        width = max(len(share) for share in shares)  # a gather wants equal parts
        parts = self._group.gather(pad(part_RV, (0, width - part_RV.shape[1])))
        if not parts:
            return part_RV.float()
        return torch.cat(
            [part[:, : len(share)] for part, share in zip(parts, shares, strict=True)], 1
        ).float()

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        """Return [T, M]; of several ranks each gives the rows of its token ids, and zeros for the others."""
        if self._group.size == 1:
            return embedding(token_ids_T, self._embedding_VM)
        own = self.share.token_ids
        rows_T = token_ids_T - own.start
        hidden_TM = embedding(rows_T.clamp(0, len(own) - 1), self._embedding_VM)
        hidden_TM.masked_fill_(((rows_T < 0) | (rows_T >= len(own)))[:, None], 0.0)
        return self._group.all_reduce(hidden_TM)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.norm_epsilon)


def _layer_weights(config: DecoderConfig, weights: Weights, layer: int, share: Share) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    model, inner = config.model_dim, config.inner_dim
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    own_queries, own_keys = _dims(share.heads, config.head_dim), _dims(share.kv_heads, config.head_dim)

    def by_output(name: str, own: range, rows: int, *, biased: bool) -> Linear:
        weight = weights.take_rows(f"{prefix}.{name}.weight", own, rows, model)
        return Linear(weight, weights.take_rows(f"{prefix}.{name}.bias", own, rows) if biased else None)

    def by_input(name: str, own: range, columns: int, *, biased: bool) -> Linear:
        weight = weights.take_columns(f"{prefix}.{name}.weight", own, model, columns)
        bias = weights.take(f"{prefix}.{name}.bias", model) if biased else None
        return Linear(weight, bias if share.adds_bias else None)

    def head_norm(name: str) -> Tensor | None:
        return weights.take(f"{prefix}.{name}.weight", config.head_dim) if config.head_norms else None

    return LayerWeights(
        attention_norm_M=weights.take(f"{prefix}.input_layernorm.weight", model),
        query=by_output("self_attn.q_proj", own_queries, queries, biased=config.qkv_bias),
        key=by_output("self_attn.k_proj", own_keys, keys, biased=config.qkv_bias),
        value=by_output("self_attn.v_proj", own_keys, keys, biased=config.qkv_bias),
        query_norm_D=head_norm("self_attn.q_norm"),
        key_norm_D=head_norm("self_attn.k_norm"),
        out=by_input("self_attn.o_proj", own_queries, queries, biased=config.out_bias),
        feed_forward_norm_M=weights.take(f"{prefix}.post_attention_layernorm.weight", model),
        gate=by_output("mlp.gate_proj", share.inner, inner, biased=config.feed_forward_bias),
        up=by_output("mlp.up_proj", share.inner, inner, biased=config.feed_forward_bias),
        down=by_input("mlp.down_proj", share.inner, inner, biased=config.feed_forward_bias),
    )


def _dims(heads: range, head_dim: int) -> range:
    """Return the rows of a projection that belong to some heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def _vocabulary_matrix(config: DecoderConfig, weights: Weights, name: str, share: Share) -> Tensor:
    return weights.take_rows(name, share.token_ids, config.vocab_size, config.model_dim)


def _head(config: DecoderConfig, weights: Weights, embedding_VM: Tensor, share: Share) -> Tensor:
    """Return the output matrix.  A tied model may bring a second copy; a copy that differs is used."""
    if config.tied and "lm_head.weight" not in weights:
        return embedding_VM
    head_VM = _vocabulary_matrix(config, weights, "lm_head.weight", share)
    return embedding_VM if config.tied and torch.equal(head_VM, embedding_VM) else head_VM
