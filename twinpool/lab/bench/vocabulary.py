"""What prompts are made of: tokens of the model that is asked, or words where its tokens are not known.

Equal blocks of a workload give equal pieces, so that equal beginnings are equal prefixes to the server too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from twinpool.lab.workload.item import WorkItem

T = TypeVar("T")

TEXT = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but
what all were when we there can an your which their said if do will each about how up out them then she
many some so these would other into has more her two like him see time could no make than first been its
who now people my made over did down only way find use may water long little very after words called
just where most know get through back much before go good new write our used me man too any day same
right look think also around another came come work three word must because does part even place well
such here take why things help put years different away again off went old number great tell men say
small every found still between name should home big give air line set own under read last never us left
end along while might next sound below saw something thought both few those always looked show large
often together asked house world going want school important until form food keep children feet land
side without boy once animals life enough took sometimes four head above kind began almost live page got
earth need far hand high year mother light parts country father let night following picture being study
second eyes
"""
WORDS = tuple(TEXT.split())


_PIECES = 256  # that are used: one byte says which


class Vocabulary:
    """Pieces that count as one token each, and how they are written one after the other.

    Args:
        ids: A server takes them as they are, as a list of numbers.  Without any, words are joined to a text,
            and the server's own count of it is what is reported.
        seed: Another one gives other prompts.
    """

    def __init__(self, ids: Sequence[int] = (), *, seed: int = 0) -> None:
        self._ids = _table(ids) if ids else None
        self._words = _table(WORDS)
        self._seed = seed

    def prompt(self, item: WorkItem) -> list[int] | str:
        """Return the prompt of a request: its text, or else ids or words that stand for its blocks."""
        if item.text or self._ids is None:
            return self.text(item)
        ids = self._ids
        return [ids[place] for place in self._places(item)]

    def text(self, item: WorkItem) -> str:
        """Return the same as a text, for a chat."""
        if item.text:
            return item.text
        words = self._words
        return " ".join([words[place] for place in self._places(item)])

    def _places(self, item: WorkItem) -> bytes:
        """Return which piece stands at each place of the prompt."""
        drawn = []
        left = item.prompt_tokens
        for block in item.blocks:
            drawn.append(self._draw(f"block {block}", min(left, item.block_tokens)))
            left -= item.block_tokens
        if left > 0:
            drawn.append(self._draw(f"request {item.index}", left))
        return b"".join(drawn)

    def _draw(self, what: str, tokens: int) -> bytes:
        """Return a byte a token that depends on the seed and on ``what`` alone; fewer begin as more do."""
        return hashlib.shake_128(f"{self._seed} {what}".encode()).digest(tokens)


def _table(pieces: Sequence[T]) -> list[T]:
    return [pieces[place % len(pieces)] for place in range(_PIECES)]
