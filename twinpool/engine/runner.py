"""Runs a plan on the model: tokens in, keys and values into the cache, the next tokens out.

Knows plans and tensors; does not know queues, blocks' owners or the network.  That every token id has a row
in the embedding was checked by the engine.

Shapes: T tokens in the batch, R rows of it, M model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from twinpool.core.request import TokenLogprob
from twinpool.engine.attention_kernel import attention_kernel
from twinpool.engine.batch import Batch, Span, build_batch
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel
from twinpool.engine.plan import BatchItem, BatchPlan, ItemResult, LayerHook
from twinpool.engine.sampler import SampledSequence, Sampler

LOGITS_PER_SLICE = 2**23  # of prompt log-probabilities: 32 MiB of float32 at a time


class TorchRunner:
    """Computes batches with torch; implements ``Runner``.  Used by one thread at a time.

    Args:
        loaded: The model.
        cache: Of the model's layout.
        attention: A file name in twinpool/engine/attention.

    Raises:
        ConfigError: There is no such attention kernel.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, *, attention: str = "torch_sdpa") -> None:
        spec = loaded.spec
        assert cache.layout == spec.layout(block_tokens=cache.layout.block_tokens), "a cache of another model"
        self._model = loaded.model
        self._vocab_size = spec.vocab_size
        self._cache = cache
        self._attention = attention_kernel(attention, num_kv_heads=spec.num_kv_heads)
        self._sampler = Sampler(sampling_vocab_size=spec.sampling_vocab_size, eos_ids=spec.eos_ids)

    @torch.inference_mode()
    def run(self, plan: BatchPlan, on_layer: LayerHook | None) -> tuple[ItemResult, ...]:
        """Write the KV of every item, layer by layer, and choose the next token where an item samples.

        An item that fails has an error in its result, and none of the others notices.
        """
        # Attention takes neighbours of like length together.
        order = sorted(range(len(plan.items)), key=lambda index: _attention_order(plan.items[index]))
        results = self._run([plan.items[index] for index in order], on_layer)
        return tuple(result for _, result in sorted(zip(order, results, strict=True), key=itemgetter(0)))

    def _run(self, items: Sequence[BatchItem], on_layer: LayerHook | None) -> list[ItemResult]:
        block_tokens = self._cache.layout.block_tokens
        batch = build_batch(items, block_tokens=block_tokens, device=self._model.device)
        hidden_TM = self._model.forward(batch, self._cache, self._attention, on_layer)
        sampled = iter(self._sample(items, batch, hidden_TM))
        results = []
        for item, span in zip(items, batch.spans, strict=True):
            result = next(sampled) if item.samples else ItemResult()
            results.append(self._with_prompt_logprobs(result, item, span, hidden_TM))
        return results

    def _sample(self, items: Sequence[BatchItem], batch: Batch, hidden_TM: Tensor) -> tuple[ItemResult, ...]:
        pairs = [(item, span) for item, span in zip(items, batch.spans, strict=True) if item.samples]
        if not pairs:
            return ()
        rows = torch.tensor([span.offset + span.num_tokens - 1 for _, span in pairs], device=hidden_TM.device)
        sequences = [
            SampledSequence(
                sampling=item.sequence.request.sampling,
                token_ids=item.sequence.token_ids,
                num_prompt_tokens=item.sequence.num_prompt_tokens,
            )
            for item, _ in pairs
        ]
        return self._sampler.sample(self._model.logits(hidden_TM.index_select(0, rows)), sequences)

    def _with_prompt_logprobs(
        self, result: ItemResult, item: BatchItem, span: Span, hidden_TM: Tensor
    ) -> ItemResult:
        num_top = item.sequence.request.sampling.num_prompt_logprobs
        count = min(span.num_tokens, item.sequence.num_prompt_tokens - 1 - span.first_token)
        if num_top is None or count <= 0 or result.error is not None:
            return result
        logprobs: list[TokenLogprob] = []
        step = max(1, LOGITS_PER_SLICE // self._vocab_size)
        for start in range(0, count, step):
            end = min(count, start + step)
            logits_RV = self._model.logits(hidden_TM[span.offset + start : span.offset + end])
            followers = item.sequence.token_ids[span.first_token + start + 1 : span.first_token + end + 1]
            logprobs.extend(self._sampler.logprobs(logits_RV, followers, num_top=num_top))
        return ItemResult(token_id=result.token_id, logprob=result.logprob, prompt_logprobs=tuple(logprobs))


def _attention_order(item: BatchItem) -> tuple[bool, int]:
    return (item.num_tokens > 1, item.first_token)
