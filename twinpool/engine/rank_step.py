"""One step on one rank: the same computation on all of them, in the same order of collectives.

Shapes: T tokens in the batch, R rows of it, M model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.engine.attention_kernel import attention_kernel
from twinpool.engine.batch import Batch, Span, build_batch
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel
from twinpool.engine.plan import LayerHook
from twinpool.engine.rank_plan import RankItem, RankPlan

LOGITS_PER_SLICE = 2**23  # of prompt log-probabilities: 32 MiB of float32 at a time


@dataclass(frozen=True, slots=True)
class Computed:
    """What the layers made of a plan; the logits of its rows are computed when they are asked for."""

    plan: RankPlan
    batch: Batch
    hidden_TM: Tensor


class RankStep:
    """Runs plans on one rank's share of the model and its cache.

    Args:
        loaded: The model.
        cache: Of the model's layout, of this rank's heads.
        attention: A file name in twinpool/engine/attention.

    Raises:
        ConfigError: There is no such attention kernel.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, *, attention: str) -> None:
        self._model = loaded.model
        self._vocab_size = loaded.spec.vocab_size
        self._cache = cache
        kv_heads = loaded.model.share.kv_heads
        layout = loaded.spec.layout(block_tokens=cache.layout.block_tokens, tp_size=loaded.group.size)
        assert (cache.layout, cache.heads) == (layout, kv_heads), "a cache of another model"
        self._attention = attention_kernel(attention, num_kv_heads=len(kv_heads))

    def forward(self, plan: RankPlan, on_layer: LayerHook | None) -> Computed:
        """Compute all tokens of a plan; their keys and values are in the cache, layer by layer."""
        block_tokens = self._cache.layout.block_tokens
        batch = build_batch(plan.items, block_tokens=block_tokens, device=self._model.device)
        return Computed(plan, batch, self._model.forward(batch, self._cache, self._attention, on_layer))

    def sampled_logits(self, computed: Computed) -> Tensor | None:
        """Return [R, V] for the items that sample, in their order; None if there are none."""
        rows = [
            span.offset + span.num_tokens - 1
            for item, span in zip(computed.plan.items, computed.batch.spans, strict=True)
            if item.samples
        ]
        if not rows:
            return None
        index = torch.tensor(rows, device=computed.hidden_TM.device)
        return self._model.logits(computed.hidden_TM.index_select(0, index))

    def prompt_logits(self, computed: Computed, item: RankItem, span: Span) -> Iterator[tuple[int, Tensor]]:
        """Yield the logits of an item's prompt tokens in slices: the position of the first, and [R, V]."""
        step = max(1, LOGITS_PER_SLICE // self._vocab_size)
        for start in range(0, item.num_prompt_logits, step):
            end = min(item.num_prompt_logits, start + step)
            rows_RM = computed.hidden_TM[span.offset + start : span.offset + end]
            yield span.first_token + start, self._model.logits(rows_RM)

    def all_logits(self, computed: Computed) -> None:
        """Take part in all logits of a step; rank 0 gets them."""
        self.sampled_logits(computed)
        for item, span in zip(computed.plan.items, computed.batch.spans, strict=True):
            for _ in self.prompt_logits(computed, item, span):
                pass
