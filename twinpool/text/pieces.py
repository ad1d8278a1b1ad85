"""What one token adds to the text, as bytes, so that text can be put together token by token.

Knows the decoders of the ``tokenizers`` library.  A decoder there maps the whole list of tokens to a
string; the ones understood here depend on nothing but the token and on whether it is the first, which
is what makes the cost of a token independent of the length of the answer.

Source: huggingface/tokenizers, tokenizers/src/decoders and src/pre_tokenizers/{byte_level,metaspace}.rs.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from twinpool.core.errors import ModelError

_Step = Callable[[str, bool], str | bytes]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """The bytes that each token adds.

    Args:
        decoder: The ``decoder`` entry of a ``tokenizer.json``; None joins tokens with spaces.

    Raises:
        ModelError: The decoder is of a kind that cannot be followed token by token.
    """

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self.strip_char = ""  # dropped from the start of the whole text
        self.strip_limit = 0  # at most so many times
        self._steps: list[_Step] = []
        is_fused = False  # from here on the library sees one string, not tokens
        for part in _flat(decoder):
            kind = part["type"]
            if kind == "Fuse":
                is_fused = True
            elif kind == "Strip" and is_fused and part["stop"] == 0 and not self.strip_limit:
                self.strip_char, self.strip_limit = part["content"], part["start"]
            elif is_fused:
                raise ModelError("--model", f"tokenizer decoder {kind} after Fuse is not supported")
            else:
                self._steps.append(_step(part))
                is_fused = kind == "ByteLevel"

    def piece(self, token: str, *, is_first: bool) -> bytes:
        """Return what ``token`` adds; ``is_first`` says that no other token of the answer precedes it."""
        for step in self._steps:
            done = step(token, is_first)
            if isinstance(done, bytes):
                return done
            token = done
        return token.encode("utf-8")


class TextAssembler:
    """Turns pieces into text: no character before its last byte, U+FFFD only for what can never be one."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_char = pieces.strip_char
        self._strip_left = pieces.strip_limit

    def add(self, piece: bytes) -> str:
        """Return the characters that ``piece`` completes."""
        return self._stripped(self._utf8.decode(piece))

    def end(self) -> str:
        """Return what an unfinished character at the end of the text stands for: U+FFFD, or nothing."""
        return self._stripped(self._utf8.decode(b"", True))

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text


def _flat(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        yield {"type": "Spaces"}
    elif decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _flat(part)
    else:
        yield decoder


def _step(part: Mapping[str, Any]) -> _Step:
    kind = part["type"]
    if kind == "ByteLevel":
        return _byte_level()
    if kind == "ByteFallback":
        return _byte_fallback
    if kind == "Metaspace":
        return _metaspace(part)
    if kind == "Replace" and "String" in part["pattern"]:
        old, new = part["pattern"]["String"], part["content"]
        return lambda token, is_first: token.replace(old, new)
    if kind == "Strip":
        return _strip(part)
    if kind == "Spaces":
        return lambda token, is_first: token if is_first else " " + token
    raise ModelError("--model", f"tokenizer decoder {kind} is not supported")


def _byte_level() -> _Step:
    """Undo GPT-2's writing of bytes as printable characters; other text stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of.update({chr(256 + index): byte for index, byte in enumerate(others)})

    def step(token: str, is_first: bool) -> bytes:
        try:
            return bytes([byte_of[char] for char in token])
        except KeyError:
            return token.encode("utf-8")

    return step


def _byte_fallback(token: str, is_first: bool) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return token if match is None else bytes([int(match[1], 16)])


def _metaspace(part: Mapping[str, Any]) -> _Step:
    mark = part["replacement"]
    drops_first = part.get("prepend_scheme", "always") != "never"

    def step(token: str, is_first: bool) -> str:
        return token.replace(mark, "" if is_first and drops_first else " ")

    return step


def _strip(part: Mapping[str, Any]) -> _Step:
    char, start, stop = part["content"], part["start"], part["stop"]

    def step(token: str, is_first: bool) -> str:
        begin, end = 0, len(token)
        while begin < min(start, len(token)) and token[begin] == char:
            begin += 1
        while end > begin and end > len(token) - stop and token[end - 1] == char:
            end -= 1
        return token[begin:end]

    return step
