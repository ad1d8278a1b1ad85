"""The text of an answer while it grows: every token gives the text that it completes.

Knows one answer.  The deltas and the flush, joined, are ``Tokenizer.decode`` of all its ids.
"""

from __future__ import annotations

from twinpool.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the tokens of one answer into text; a token costs the same wherever in the answer it stands.

    Args:
        tokenizer: The model's.
        skip_special_tokens: Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._assembler = tokenizer.assembler()
        self._is_first = True

    def push(self, token_id: int) -> str:
        """Return the characters that ``token_id`` completes; none while it is only part of one."""
        piece = self._tokenizer.piece(
            token_id, is_first=self._is_first, skip_special_tokens=self._skip_special_tokens
        )
        if piece is None:
            return ""
        self._is_first = False
        return self._assembler.add(piece)

    def flush(self) -> str:
        """Return what is left at the end of the answer: U+FFFD if it was cut inside a character."""
        return self._assembler.end()
