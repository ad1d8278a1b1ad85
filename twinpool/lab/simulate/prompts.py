"""Requests of a workload as the engine knows them: token ids that are equal where contents are."""

from __future__ import annotations

from functools import lru_cache

from twinpool.core.request import Request, SamplingParams
from twinpool.lab.workload.item import WorkItem

_IDS = (
    2**31 - 1
)  # token ids of contents are 1 .. _IDS; 0 is the token of every answer, those above are nobody's


def request_of(item: WorkItem, *, timeout_s: float, num_tokens: int) -> Request:
    """Return the request of ``item``: as many tokens as it says, whatever they are.

    Two prompts begin with the same token ids as far as their ``blocks`` are equal.  A prompt of unknown
    content is all zeros: nothing may look for prefixes then.

    Args:
        timeout_s: Of the whole answer.
        num_tokens: Of the answer.
    """
    return Request(
        request_id=str(item.index),
        prompt_ids=_prompt_ids(item),
        sampling=_sampling(num_tokens),
        timeout_s=timeout_s,
        cache_salt=item.tenant,
    )


@lru_cache(maxsize=4096)
def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=num_tokens, ignore_eos=True)


def _prompt_ids(item: WorkItem) -> tuple[int, ...]:
    if not item.blocks:
        return (0,) * item.prompt_tokens
    ids: list[int] = []
    for content in item.blocks:
        ids += [content % _IDS + 1] * item.block_tokens
    del ids[item.prompt_tokens :]
    ids += [_IDS + 1 + item.index % _IDS] * (item.prompt_tokens - len(ids))
    return tuple(ids)
