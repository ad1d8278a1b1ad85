"""What prompts are made of: tokens of the model that is asked, or words where its tokens are not known.

Equal blocks of a workload give equal pieces, so that equal beginnings are equal prefixes to the server too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.lab.workload.item import WorkItem

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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces that count as one token each, and how they are written one after the other.

    ``ids`` are written as a JSON list of numbers, which a server takes as they are; without ids, words are
    joined to a text, and the server's own count of it is what is reported.
    """

    ids: tuple[int, ...] = ()
    seed: int = 0

    def prompt(self, item: WorkItem) -> list[int] | str:
        """Return the prompt of a request: its text, or else ids or words that stand for its blocks."""
        if item.text:
            return item.text
        places = self._places(item)
        if self.ids:
            ids = self.ids
            return [ids[place] for place in places]
        return " ".join(WORDS[place] for place in places)

    def text(self, item: WorkItem) -> str:
        """Return the same as a text, for a chat."""
        return item.text or " ".join(WORDS[place % len(WORDS)] for place in self._places(item))

    def _places(self, item: WorkItem) -> Sequence[int]:
        """Return which piece stands at each place of the prompt."""
        drawn = []
        left = item.prompt_tokens
        for block in item.blocks:
            drawn.append(self._draw(f"block {block}", min(left, item.block_tokens)))
            left -= item.block_tokens
        if left > 0:
            drawn.append(self._draw(f"request {item.index}", left))
        numbers = np.frombuffer(b"".join(drawn), "<u4") % len(self.ids or WORDS)
        places: list[int] = numbers.tolist()
        return places

    def _draw(self, what: str, tokens: int) -> bytes:
        """Return four bytes a token that depend on the seed and on ``what`` alone; fewer begin as more do."""
        return hashlib.shake_128(f"{self.seed} {what}".encode()).digest(4 * tokens)
