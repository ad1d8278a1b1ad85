"""The JSON of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from router.http.answers import Answer, finite
from router.http.assemble import Delta, TokenEntry
from twinpool.core.request import TokenLogprob
from twinpool.text.tokenizer import Tokenizer


class CompletionShape:
    """Writes choices of /v1/completions.

    Args:
        tokenizer: For the texts of single tokens.
        num_logprobs: Alternatives per token, or None for no log-probabilities.
        num_prompt_logprobs: The same for vLLM's ``prompt_logprobs`` field.
    """

    prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, *, num_logprobs: int | None, num_prompt_logprobs: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs

    def opening(self, index: int) -> dict[str, object] | None:
        return None

    def part(self, index: int, delta: Delta) -> dict[str, object]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish,
        }

    def whole(self, index: int, answer: Answer) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": answer.text,
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
        return {
            "tokens": [token_name(self._tokenizer, entry.token_id) for entry in entries],
            "token_logprobs": [
                None if entry.logprob is None else finite(entry.logprob.logprob) for entry in entries
            ],
            "top_logprobs": [self._top(entry.logprob, self._num_logprobs) for entry in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }

    def _top(self, logprob: TokenLogprob | None, number: int) -> dict[str, float] | None:
        """Return the best tokens by name, best first; the chosen one is always among them."""
        if logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top[:number], (logprob.token_id, logprob.logprob)):
            top.setdefault(token_name(self._tokenizer, token_id), finite(value))
        return top


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Return the text of one token, or ``bytes:\xf0\x9f`` as OpenAI writes a part of a character."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None], number: int
) -> list[dict[str, object] | None]:
    """Return the log-probabilities of a prompt in the shape of vLLM's ``prompt_logprobs``."""
    return [None if each is None else _by_id(tokenizer, each, number) for each in logprobs]


def _by_id(tokenizer: Tokenizer, logprob: TokenLogprob, number: int) -> dict[str, object]:
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(logprob.top[:number], start=1)]
    ranked.append((logprob.token_id, logprob.logprob, logprob.rank))
    return {
        str(token_id): {
            "logprob": finite(value),
            "rank": rank,
            "decoded_token": token_name(tokenizer, token_id),
        }
        for token_id, value, rank in ranked
    }
