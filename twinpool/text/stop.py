"""Ends a text where a stop string begins, however the text is cut into pieces.

Knows text only.  What could still become a stop string is held back, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for the stop string that begins earliest in a growing text.

    Of two that begin at the same place, the shorter one is reported.  The result does not depend on how
    the text is cut: a stop string that is complete waits while one that began before it may still come.

    Args:
        stops: The stop strings, none of them empty.

    Attributes:
        matched: The stop string found, once it is certain; after ``flush`` it always is.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string ends every text"
        self.matched: str | None = None
        self._searches = [_Search(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._held_at = 0  # position of the held text in the whole

    def push(self, text: str) -> tuple[str, str | None]:
        """Add ``text``; return what may be shown now, and the stop string if the text is over.

        After a stop string was returned, nothing more is pushed.
        """
        assert self.matched is None, "the text is over"
        end = self._held_at + len(self._held)
        self._held += text
        if not self._searches:
            return self._release(end + len(text)), None
        for position, char in enumerate(text, start=end + 1):
            for search in self._searches:
                search.push(char, position)
            best = self._best()
            if best is not None and self._open_from(position) >= best.start:
                self.matched = best.stop
                return self._release(best.start), best.stop
        return self._release(self._open_from(end + len(text))), None

    def flush(self) -> str:
        """Return what was held back, up to a stop string if there is one; the text is over."""
        if self.matched is not None:
            return ""
        best = self._best()
        if best is None:
            return self._release(self._held_at + len(self._held))
        self.matched = best.stop
        return self._release(best.start)

    def _best(self) -> _Search | None:
        found = [search for search in self._searches if search.is_found]
        return min(found, key=lambda search: (search.start, len(search.stop)), default=None)

    def _open_from(self, position: int) -> int:
        """Return where the earliest stop string that is not yet decided may begin."""
        return min(
            search.start if search.is_found else position - search.num_matched for search in self._searches
        )

    def _release(self, position: int) -> str:
        shown = self._held[: position - self._held_at]
        self._held = self._held[len(shown) :]
        self._held_at += len(shown)
        return shown


class _Search:
    """Finds the first occurrence of one stop string, one character at a time.

    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", 1977.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # length of the longest prefix of the stop that the text ends with
        self.is_found = False
        self.start = 0  # where it was found
        self._borders = _borders(stop)

    def push(self, char: str, position: int) -> None:
        """Read the character that ends at ``position``."""
        if self.is_found:
            return
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched - 1]
        if self.stop[self.num_matched] == char:
            self.num_matched += 1
        if self.num_matched == len(self.stop):
            self.is_found = True
            self.start = position - len(self.stop)


def _borders(stop: str) -> list[int]:
    """Return, for each prefix of ``stop``, how long its longest proper prefix is that also ends it."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders
