"""A workload: which requests come, when, and how long they are.  Knows nothing of who answers them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One request of a workload.

    A workload is an iterable of these, in the order of ``arrival_s``; it may be a generator, so that a
    long one is never in memory at once.
    """

    index: int  # from 0
    arrival_s: float  # after the start
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # the prompt's content, block by block: equal beginnings are equal prefixes
    block_tokens: int = 0  # in each of ``blocks`` but perhaps the last
    conversation: str = ""  # whose turn it is; empty: none
    tenant: str = ""
    text: str = ""  # of the prompt, where there is a real one
