"""Text to token ids and back, with the ``tokenizer.json`` of a Hugging Face folder.

Knows which tokens begin a text and which control; which of them end an answer, the engine knows.  It gives
the ids that ``transformers`` gives, with two deliberate differences: BOS is never put before a text that
already begins with it, and bytes that are no UTF-8 never take their valid neighbours with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from twinpool.core.errors import InvalidRequest, ModelError
from twinpool.text.pieces import TextAssembler, TokenPieces
from twinpool.text.rendered import RenderedChat, Segment

_FIELD = "--model"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer.

    Attributes:
        vocab_size: Every id that exists is below it, those of added tokens included.
        special_ids: Ids that ``skip_special_tokens`` leaves out.
        bos_id: Begins a text, or None.
        special_tokens: Texts by the names that chat templates use, as ``bos_token``.
        added_tokens: Texts that are one token wherever they stand, with whether they are special.
    """

    vocab_size: int
    special_ids: frozenset[int]
    bos_id: int | None
    special_tokens: Mapping[str, str]
    added_tokens: Mapping[str, bool]

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        bos_id: int | None,
    ) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_id = bos_id
        self.special_tokens = special_tokens
        self.added_tokens = {token.content: token.special for token in added.values()}
        # A longer text has more tokens than one, whatever it says; normalising may shorten it first.
        longest = max(map(len, vocab), default=1)
        self.max_token_chars = longest if backend.normalizer is None else 4 * longest
        self._plain_backend = _without_added_tokens(backend)
        decoder = backend.decoder
        self._pieces = TokenPieces(None if decoder is None else json.loads(decoder.__getstate__()))
        self._piece_of: dict[int, bytes] = {}
        self._newline_ids = self._ids("\n")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of the checkpoint in ``folder``.

        Raises:
            ModelError: There is no tokenizer.json, it is damaged, or its decoder is of an unknown kind.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(_FIELD, f"{folder} has no tokenizer.json")
        settings = read_json(folder / "tokenizer_config.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(_FIELD, f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        special_tokens = _special_tokens(settings)
        known = [text for text in special_tokens.values() if backend.token_to_id(text) is not None]
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known])
        bos_ids = _as_ids(backend.token_to_id(special_tokens.get("bos_token", "")))
        for name in ("config.json", "generation_config.json"):
            bos_ids += _as_ids(read_json(folder / name).get("bos_token_id"))
        return cls(backend, special_tokens=special_tokens, bos_id=bos_ids[0] if bos_ids else None)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text``; a control token that it spells is that token.

        Args:
            text: What a client sent as a prompt.
            add_special_tokens: Add what the model expects around a text.  A BOS that the text itself
                begins with is not added again.

        Raises:
            InvalidRequest: The text has an unpaired surrogate.
        """
        try:
            encoding = _encoding(self._backend, text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("prompt", "has a character that is no Unicode text") from error
        ids: list[int] = encoding.ids
        if ids[:2] == [self.bos_id, self.bos_id] and encoding.special_tokens_mask[:2] == [1, 0]:
            return ids[1:]
        return ids

    def encode_chat(self, chat: RenderedChat) -> list[int]:
        """Return the ids of a rendered chat; only the template's own control tokens are control tokens.

        Source: ``encode_marked_chat`` in huggingface/transformers, utils/chat_template_utils.py.

        Raises:
            InvalidRequest: The text has an unpaired surrogate, or a control token cannot be spelled out.
        """
        first, *others = chat.segments
        ids = self._plain_ids(first.text) if first.is_plain else self._chat_ids(first.text)
        for segment in others:
            ids += self._ids_inside(segment)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ``ids``; ids without a token add nothing."""
        assembler = self.assembler()
        text: list[str] = []
        is_first = True
        for token_id in ids:
            piece = self.piece(token_id, is_first=is_first, skip_special_tokens=skip_special_tokens)
            if piece is not None:
                text.append(assembler.add(piece))
                is_first = False
        return "".join(text) + assembler.end()

    def assembler(self) -> TextAssembler:
        """Return what joins the pieces of one text."""
        return TextAssembler(self._pieces)

    def piece(self, token_id: int, *, is_first: bool, skip_special_tokens: bool) -> bytes | None:
        """Return the bytes a token adds to a text, or None if it is not part of it."""
        if skip_special_tokens and token_id in self.special_ids:
            return None
        known = self._piece_of.get(token_id)
        if known is not None and not is_first:
            return known
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return None
        piece = self._pieces.piece(token, is_first=is_first)
        if not is_first:
            self._piece_of[token_id] = piece
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself, a leading space kept; none for an id without a token."""
        return self.piece(token_id, is_first=False, skip_special_tokens=False) or b""

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, with U+FFFD for bytes that are only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = _encoding(self._backend, text, add_special_tokens=False).ids
        return ids

    def _chat_ids(self, text: str) -> list[int]:
        try:
            return self._ids(text)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("messages", "have a character that is no Unicode text") from error

    def _ids_inside(self, segment: Segment) -> list[int]:
        """Encode after a newline, so that the tokenizer adds no space as it does where a text begins."""
        encode = self._plain_ids if segment.is_plain else self._chat_ids
        ids = encode("\n" + segment.text)
        if ids[: len(self._newline_ids)] == self._newline_ids:
            ids = ids[len(self._newline_ids) :]
        else:
            ids = encode(segment.text)
        if segment.is_plain and self._backend.token_to_id(segment.text) in ids:
            raise InvalidRequest("messages", f"{segment.text!r} is a control token and cannot be spelled out")
        return ids

    def _plain_ids(self, text: str) -> list[int]:
        """Encode without looking for added tokens."""
        ids: list[int] = _encoding(self._plain_backend, text, add_special_tokens=False).ids
        return ids


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint; an absent file is an empty one.

    Raises:
        ModelError: It holds something else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(_FIELD, f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(_FIELD, f"{path} holds no JSON object")
    return content


def _encoding(backend: Backend, text: str, *, add_special_tokens: bool) -> Encoding:
    """Encode in the only way in which the library lets other threads of Python run."""
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding


def _without_added_tokens(backend: Backend) -> Backend:
    """Return a tokenizer that shares the model of ``backend`` and takes every text for plain text."""
    plain = Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _NAMED:
        token = settings.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
