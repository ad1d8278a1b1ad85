"""The JSON of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from router.http.answers import Answer, finite
from router.http.assemble import Delta, TokenEntry
from router.http.completions import prompt_logprobs
from twinpool.text.tokenizer import Tokenizer


class ChatShape:
    """Writes choices of /v1/chat/completions.

    Args:
        tokenizer: For the texts of single tokens.
        num_logprobs: Alternatives per token, or None for no log-probabilities.
        num_prompt_logprobs: The same for vLLM's ``prompt_logprobs`` field.
    """

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, tokenizer: Tokenizer, *, num_logprobs: int | None, num_prompt_logprobs: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs

    def opening(self, index: int) -> dict[str, object] | None:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def part(self, index: int, delta: Delta) -> dict[str, object]:
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish,
        }

    def whole(self, index: int, answer: Answer) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": self._logprobs(answer.entries),
            "finish_reason": answer.finish,
        }
        if self._num_prompt_logprobs is not None and answer.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, answer.prompt_logprobs, self._num_prompt_logprobs
            )
        return choice

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, object] | None:
        if self._num_logprobs is None:
            return None
        return {"content": [self._entry(entry, self._num_logprobs) for entry in entries]}

    def _entry(self, entry: TokenEntry, number: int) -> dict[str, object]:
        assert entry.logprob is not None, "only the first token of an echoed prompt has no log-probability"
        return {
            **self._token(entry.token_id, entry.logprob.logprob),
            "top_logprobs": [self._token(token_id, value) for token_id, value in entry.logprob.top[:number]],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
