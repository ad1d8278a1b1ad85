"""When the tokens of one answer came, as gaps: those of a worker's steps as long as it decodes there.

A sequence that gets a token from every step of its worker has the gaps of these steps; so nothing is written
down per token until it leaves.
"""

from __future__ import annotations


class TokenTimes:
    """Times of one answer, over all its attempts.

    Attributes:
        first_s, last_s: Of the first and the latest known token; None before.
        gaps_s: Between one token and the next.
        joined_at: Number of the first step that counts; only while ``is_joined``.
    """

    __slots__ = ("_joined_s", "first_s", "gaps_s", "is_joined", "joined_at", "last_s")

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gaps_s: list[float] = []
        self.is_joined = False
        self.joined_at = 0
        self._joined_s = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens that came, those since ``join`` not counted."""
        return 0 if self.first_s is None else 1 + len(self.gaps_s)

    def add(self, now_s: float) -> None:
        """Count a token that came now."""
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s

    def join(self, now_s: float, step: int) -> None:
        """Get a token from each step of a worker, from number ``step`` on, which begins now."""
        self.is_joined = True
        self.joined_at = step
        self._joined_s = now_s

    def leave(self, steps_s: list[float], first_step: int) -> None:
        """Count the tokens that came since ``join``.

        Args:
            steps_s: How long the worker's steps took, up to the last one that gave a token.
            first_step: Number of the first of them.
        """
        self.is_joined = False
        gaps = steps_s[self.joined_at - first_step :]
        if not gaps:
            return
        end_s = self._joined_s + sum(gaps)
        gaps[0] += self._joined_s - self.last_s
        self.gaps_s += gaps
        self.last_s = end_s
