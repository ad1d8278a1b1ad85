"""Decodes first, then started prompts, then new ones: the time between two tokens stays even.

A long prompt is computed in the room the decodes leave, a chunk a step.

Source: the order of Algorithm 3 in Sarathi-Serve (Agrawal et al., OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.engine.plan import QueueView, SchedulerPolicy, Work


class DecodeFirst:
    """Offers every decoding sequence a token, then all prompts, oldest first."""

    def candidates(self, view: QueueView) -> Iterator[Work]:
        for sequence in view.decoding:
            yield Work(sequence, 1)
        for sequence in view.prefilling:
            yield Work(sequence, sequence.num_uncomputed_tokens)
        for sequence in view.waiting:
            yield Work(sequence, sequence.num_uncomputed_tokens)


def create() -> SchedulerPolicy:
    return DecodeFirst()
