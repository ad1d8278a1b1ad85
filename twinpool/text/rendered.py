"""A rendered chat: text that keeps apart what the template wrote and what a user only spelled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered chat."""

    text: str
    is_plain: bool  # spells a control token, but came from a user: to be encoded as ordinary text


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """What a chat template made of the messages; almost always one segment."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The whole as one string, as a person should see it."""
        return "".join(segment.text for segment in self.segments)
