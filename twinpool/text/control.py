"""Keeps what a user spells apart from what a chat template writes.

Before rendering, each control token that a user's string spells is put between two marks, characters
that occur nowhere else; after rendering, the marks tell which control tokens are only text.  A string
that ends with a part of a control token gets one mark, since the template may put the other part
beside it; if that did not happen, the mark leaves no trace.  Without marks, a rendered chat is one
segment, encoded in one go as ``transformers`` does.

Source: ``mark_control_tokens`` in huggingface/transformers, utils/chat_template_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from twinpool.core.errors import InvalidRequest
from twinpool.text.rendered import RenderedChat, Segment

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

Marks = tuple[str, str]

_PRIVATE_USE = range(0xF0000, 0xFFFFE, 2)


class ControlTokens:
    """The tokens that a user's text must not contain as such.

    Args:
        tokens: Their texts.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self.tokens = tuple(sorted(filter(None, tokens), key=lambda token: (-len(token), token)))
        self.pattern = "|".join(map(re.escape, self.tokens)) or "(?!)"
        self._regex = re.compile(self.pattern)
        self._heads = {token[:cut] for token in self.tokens for cut in range(1, len(token))}
        self._tails = {token[cut:] for token in self.tokens for cut in range(1, len(token))}
        self._reach = max(map(len, self.tokens), default=1) - 1

    def mark(self, text: str, marks: Marks) -> str:
        """Return ``text`` with its control tokens between marks, and a mark at an end that is part of one."""
        begin, end = marks
        marked = self._regex.sub(lambda match: f"{begin}{match[0]}{end}", text)
        if any(text[:length] in self._tails for length in range(1, min(self._reach, len(text)) + 1)):
            marked = begin + marked
        if any(text[-length:] in self._heads for length in range(1, min(self._reach, len(text)) + 1)):
            marked += end
        return marked

    def joins(self, left: str, right: str) -> bool:
        """Return whether a control token begins in ``left`` and ends in ``right``."""
        left, right = left[-self._reach :], right[: self._reach]
        both = left + right
        for token in self.tokens:
            at = both.find(token)
            while at >= 0:
                if at < len(left) < at + len(token):
                    return True
                at = both.find(token, at + 1)
        return False


def choose_marks(value: Plain, template: str) -> Marks:
    """Return two characters that occur neither in ``value`` nor in ``template``."""
    texts = [*_texts(value), template]
    for code in _PRIVATE_USE:
        marks = (chr(code), chr(code + 1))
        if not any(mark in text for text in texts for mark in marks):
            return marks
    raise InvalidRequest("messages", "use every private character there is")


def mark_value(value: Plain, tokens: ControlTokens, marks: Marks) -> Plain:
    """Return a copy of ``value`` with the control tokens in all its strings, keys included, marked."""
    if isinstance(value, str):
        return tokens.mark(value, marks)
    if isinstance(value, list):
        return [mark_value(item, tokens, marks) for item in value]
    if isinstance(value, dict):
        return {tokens.mark(key, marks): mark_value(item, tokens, marks) for key, item in value.items()}
    return value


def split_at_marks(text: str, tokens: ControlTokens, marks: Marks) -> RenderedChat:
    """Return the segments of a rendered text, in which no mark is left."""
    begin, end = marks
    # A template may take a marked token apart, so a mark may also stand alone; it only separates.
    parts = re.split(f"{begin}({tokens.pattern}){end}|[{begin}{end}]", text)
    segments = [Segment(parts[0], False)]
    for token, following in zip(parts[1::2], parts[2::2], strict=True):
        if token is not None:
            segments += [Segment(token, True), Segment(following, False)]
        elif tokens.joins(segments[-1].text, following):
            segments.append(Segment(following, False))
        else:
            segments[-1] = Segment(segments[-1].text + following, False)
    return RenderedChat(tuple(segment for segment in segments if segment.text) or (Segment("", False),))


def _texts(value: Plain) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        items: Iterable[Plain] = [*value.keys(), *value.values()]
        for item in items:
            yield from _texts(item)
