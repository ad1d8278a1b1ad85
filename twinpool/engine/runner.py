"""Runs a plan on the model: tokens in, keys and values into the cache, the next tokens out.

Knows plans and tensors; does not know queues, blocks' owners or the network.  That every token id has a row
in the embedding was checked by the engine.  Of several ranks this is rank 0, which tells the others
(``follower.py``) what to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import torch

from twinpool.core.request import TokenLogprob
from twinpool.engine.agreement import check_agreement
from twinpool.engine.batch import Span
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel
from twinpool.engine.plan import BatchItem, BatchPlan, ItemResult, LayerHook
from twinpool.engine.rank_plan import RankItem, rank_plan
from twinpool.engine.rank_step import Computed, RankStep
from twinpool.engine.sampler import SampledSequence, Sampler


class TorchRunner:
    """Computes batches with torch; implements ``Runner``.  Used by one thread at a time.

    Args:
        loaded: The model.
        cache: Of the model's layout.
        attention: A file name in twinpool/engine/attention.

    Raises:
        ConfigError: There is no such attention kernel, or another rank has other settings.
        RankLost: Another rank is gone.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, *, attention: str = "torch_sdpa") -> None:
        assert loaded.group.rank == 0, "the other ranks follow"
        spec = loaded.spec
        self._group = loaded.group
        self._step = RankStep(loaded, cache, attention=attention)
        self._block_tokens = cache.layout.block_tokens
        self._sampler = Sampler(sampling_vocab_size=spec.sampling_vocab_size, eos_ids=spec.eos_ids)
        check_agreement(loaded, cache, attention=attention)

    @torch.inference_mode()
    def run(self, plan: BatchPlan, on_layer: LayerHook | None) -> tuple[ItemResult, ...]:
        """Write the KV of every item, layer by layer, and choose the next token where an item samples.

        An item that fails has an error in its result, and none of the others notices.

        Raises:
            RankLost: A rank is gone or failed: the worker cannot go on.
        """
        # Attention takes neighbours of like length together.
        order = sorted(range(len(plan.items)), key=lambda index: _attention_order(plan.items[index]))
        results = self._run([plan.items[index] for index in order], on_layer)
        return tuple(result for _, result in sorted(zip(order, results, strict=True), key=itemgetter(0)))

    def _run(self, items: Sequence[BatchItem], on_layer: LayerHook | None) -> list[ItemResult]:
        plan = rank_plan(items, block_tokens=self._block_tokens)
        if self._group.size > 1:
            self._group.send_plan(plan.encode())
        with self._group.step():
            computed = self._step.forward(plan, on_layer)
            sampled = iter(self._sample(items, computed))
            results = []
            for item, part, span in zip(items, plan.items, computed.batch.spans, strict=True):
                result = next(sampled) if item.samples else ItemResult()
                logprobs = self._prompt_logprobs(item, computed, part, span)
                if logprobs and result.error is None:
                    result = replace(result, prompt_logprobs=logprobs)
                results.append(result)
        return results

    def _sample(self, items: Sequence[BatchItem], computed: Computed) -> tuple[ItemResult, ...]:
        logits_RV = self._step.sampled_logits(computed)
        if logits_RV is None:
            return ()
        sequences = [
            SampledSequence(
                sampling=item.sequence.request.sampling,
                token_ids=item.sequence.token_ids,
                num_prompt_tokens=item.sequence.num_prompt_tokens,
            )
            for item in items
            if item.samples
        ]
        return self._sampler.sample(logits_RV, sequences)

    def _prompt_logprobs(
        self, item: BatchItem, computed: Computed, part: RankItem, span: Span
    ) -> tuple[TokenLogprob, ...]:
        logprobs: list[TokenLogprob] = []
        for first_token, logits_RV in self._step.prompt_logits(computed, part, span):
            followers = item.sequence.token_ids[first_token + 1 : first_token + 1 + len(logits_RV)]
            num_top = item.sequence.request.sampling.num_prompt_logprobs
            logprobs.extend(self._sampler.logprobs(logits_RV, followers, num_top=num_top or 0))
        return tuple(logprobs)


def _attention_order(item: BatchItem) -> tuple[bool, int]:
    return (item.num_tokens > 1, item.first_token)
