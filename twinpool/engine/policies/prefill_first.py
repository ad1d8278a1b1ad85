"""Prompts first, decodes in the room they leave: the first token comes early, the next ones unevenly.

Decodes wait while prompts fill the batch, but not for ever: a worker holds no more than
``max_sequences`` unfinished sequences, so the prompts run out.  Sequences that decode elsewhere do
not count there; a worker that mixes those with decodes of its own wants ``decode_first``.
"""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.engine.plan import QueueView, SchedulerPolicy, Work


class PrefillFirst:
    """Offers all prompts, started ones before new ones, then every decoding sequence a token."""

    def candidates(self, view: QueueView) -> Iterator[Work]:
        for sequence in view.prefilling:
            yield Work(sequence, sequence.num_uncomputed_tokens)
        for sequence in view.waiting:
            yield Work(sequence, sequence.num_uncomputed_tokens)
        for sequence in view.decoding:
            yield Work(sequence, 1)


def create() -> SchedulerPolicy:
    return PrefillFirst()
