"""What happens in steps that give each decoding sequence a token and do nothing else.

Such steps differ only where a sequence takes another block, fills one, or ends; the many between these need
no look.  Knows no queue and no pool; the scheduler books what is listed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from twinpool.engine.sequence import SequenceState


class Change(IntEnum):
    """What becomes of one sequence in one step, in the order of a step."""

    GROW = 0  # it takes a block for its next token, while the step is planned
    FILL = 1  # its last block is full, and can be published
    END = 2  # its last token is chosen


Event = tuple[int, bool, int, Change]
"""``(step, is_after_run, place, change)``: sorted, events stand in the order in which single steps have them.
``place`` is that of the sequence in the list, ``step`` counts from 0."""


def events_ahead(sequences: Sequence[SequenceState], num_steps: int, *, block_tokens: int) -> list[Event]:
    """List what happens to decoding sequences in their next steps, in its order.

    Args:
        sequences: All that decode, in order; none of them ends before the last step.
        num_steps: In each of which each sequence gets a token.
        block_tokens: Tokens of a block.
    """
    events: list[Event] = []
    for place, sequence in enumerate(sequences):
        known = len(sequence.token_ids)
        first_growth = len(sequence.blocks) * block_tokens - known + 1
        for step in range(first_growth, num_steps, block_tokens):
            events.append((step, False, place, Change.GROW))
        for step in range(-known % block_tokens, num_steps, block_tokens):
            events.append((step, True, place, Change.FILL))
        if sequence.num_tokens_left <= num_steps:
            events.append((num_steps - 1, True, place, Change.END))
    events.sort()
    return events


def num_growths(sequences: Sequence[SequenceState], num_steps: int, *, block_tokens: int) -> int:
    """Return how many blocks decoding sequences take in their next ``num_steps`` steps."""
    total = 0
    for sequence in sequences:
        num_tokens = len(sequence.token_ids) + num_steps - 1
        total += -(-num_tokens // block_tokens) - len(sequence.blocks)
    return total
