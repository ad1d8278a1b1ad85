"""From the tokens of one answer to its text, with stop strings cut out and one log-probability entry a token.

Knows text and tokens; the shapes of ``completions.py`` and ``chat.py`` turn its deltas into JSON.
The texts of the deltas, joined, are the text of the answer; so are their entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.core.errors import InternalError
from twinpool.core.request import FinishReason, TokenLogprob, TokenOutput
from twinpool.text.detokenizer import IncrementalDetokenizer
from twinpool.text.stop import StopMatcher
from twinpool.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How tokens become the text that a client sees."""

    stops: tuple[str, ...] = ()
    min_tokens: int = 0  # stop strings are looked for only in what comes after so many tokens
    skip_special_tokens: bool = True
    keeps_logprobs: bool = False
    is_prompt_only: bool = False  # max_tokens was 0: the one token that the engine needs is not shown
    echo: str | None = None  # shown before the answer


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with its log-probability; None for the first token of a prompt."""

    token_id: int
    logprob: TokenLogprob | None
    text_offset: int  # where its text begins, in characters of the whole text, echo included


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one token added."""

    text: str
    entries: tuple[TokenEntry, ...] = ()
    num_tokens: int  # of the answer so far, those that show no text included
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(slots=True)
class _HeldEntry:
    entry: TokenEntry
    end: int | None  # where its text ends; None until a later token completes its character


class AnswerAssembler:
    """Assembles one answer.

    Args:
        tokenizer: The model's.
        prompt_ids: Echoed before the answer if ``rules`` say so.
        rules: How tokens become text.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int], rules: TextRules) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._rules = rules
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=rules.skip_special_tokens)
        self._matcher = StopMatcher(rules.stops)
        self._num_pushed = 0
        self._decoded = len(rules.echo or "")  # characters known, shown or held back
        self._shown = 0
        self._held: list[_HeldEntry] = []

    def push(self, output: TokenOutput) -> Delta:
        """Take the next token; after a delta with ``finish`` no other is taken."""
        self._num_pushed += 1
        echoed = self._echo(output) if self._num_pushed == 1 else ""
        if self._rules.is_prompt_only:
            return self._delta(echoed, output, num_tokens=0, finish=FinishReason.LENGTH)

        text = self._text_of(output)
        self._hold_entry(output, text)
        shown, finish = self._cut(text, output)
        return self._delta(echoed + shown, output, num_tokens=self._num_pushed, finish=finish)

    def _text_of(self, output: TokenOutput) -> str:
        """Return what the token completes; the text of a stop token is never shown."""
        text = "" if output.finish is FinishReason.STOP else self._detokenizer.push(output.token_id)
        if output.finish is not None:
            text += self._detokenizer.flush()
        return text

    def _cut(self, text: str, output: TokenOutput) -> tuple[str, FinishReason | None]:
        if output.index < self._rules.min_tokens:
            return text, output.finish
        shown, stop = self._matcher.push(text)
        if output.finish is not None:
            shown += self._matcher.flush()
            stop = self._matcher.matched
        return shown, FinishReason.STOP if stop is not None else output.finish

    def _hold_entry(self, output: TokenOutput, text: str) -> None:
        start = self._decoded
        self._decoded += len(text)
        if not self._rules.keeps_logprobs:
            return
        if output.logprob is None:
            raise InternalError("a worker sent a token without its log-probability")
        self._held.append(_HeldEntry(TokenEntry(output.token_id, output.logprob, start), None))
        self._set_ends(text)

    def _set_ends(self, text: str) -> None:
        if text:
            for held in self._held:
                held.end = self._decoded if held.end is None else held.end

    def _delta(
        self, text: str, output: TokenOutput, *, num_tokens: int, finish: FinishReason | None
    ) -> Delta:
        self._shown += len(text)
        ready = 0
        while ready < len(self._held) and (finish is not None or self._is_shown(self._held[ready])):
            ready += 1
        entries = tuple(self._limited(held.entry) for held in self._held[:ready])
        del self._held[:ready]
        return Delta(
            text=text,
            entries=entries,
            num_tokens=num_tokens,
            token_ids=() if self._rules.is_prompt_only else (output.token_id,),
            finish=finish,
            prompt_logprobs=output.prompt_logprobs,
        )

    def _is_shown(self, held: _HeldEntry) -> bool:
        return held.end is not None and held.end <= self._shown

    def _limited(self, entry: TokenEntry) -> TokenEntry:
        """Let no offset point behind the end: a stop string may have cut the text that it belonged to."""
        if entry.text_offset <= self._shown:
            return entry
        return TokenEntry(entry.token_id, entry.logprob, self._shown)

    def _echo(self, output: TokenOutput) -> str:
        echo = self._rules.echo
        if echo is None:
            return ""
        if self._rules.keeps_logprobs:
            if output.prompt_logprobs is None or len(output.prompt_logprobs) != len(self._prompt_ids):
                raise InternalError("a worker sent no log-probability for each token of the prompt")
            self._hold_prompt_entries(output.prompt_logprobs, limit=len(echo))
        return echo

    def _hold_prompt_entries(self, logprobs: Sequence[TokenLogprob | None], *, limit: int) -> None:
        detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=True)
        start = 0
        for token_id, logprob in zip(self._prompt_ids, logprobs, strict=True):
            self._held.append(_HeldEntry(TokenEntry(token_id, logprob, min(start, limit)), limit))
            start += len(detokenizer.push(token_id))
