"""AnswerAssembler: stop strings never leak, nothing else is lost, and every token has one entry."""

from __future__ import annotations

import itertools

import pytest

from router.http.assemble import AnswerAssembler, Delta, TextRules
from tests.router_http.toys import EOS, byte_tokenizer, logprob_of
from twinpool.core.errors import InternalError
from twinpool.core.request import FinishReason, TokenOutput

TOKENIZER = byte_tokenizer()


def assembled(ids: list[int], rules: TextRules, *, last: FinishReason = FinishReason.LENGTH) -> list[Delta]:
    assembler = AnswerAssembler(TOKENIZER, prompt_ids=(97, 98), rules=rules)
    deltas = []
    for index, token_id in enumerate(ids):
        finish = last if index == len(ids) - 1 else None
        prompt_logprobs = (None, logprob_of(98, 1)) if index == 0 else None
        output = TokenOutput(
            index=index,
            token_id=token_id,
            finish=finish,
            logprob=logprob_of(token_id, 1),
            prompt_logprobs=prompt_logprobs,
        )
        deltas.append(assembler.push(output))
        if deltas[-1].finish is not None:
            break
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("The quick brown fox!", ("own fox",), "The quick br"),
        ("The quick brown fox!", ("qui",), "The "),
        ("The quick brown fox!", ("w",), "The quick bro"),
        ("The quick brown fox!", ("own", "brown f"), "The quick "),
        ("The quick brown fox!", ("fox", "fox!"), "The quick brown "),
        ("aaab tail", ("aab",), "a"),
        ("near miss: fo", ("fox",), "near miss: fo"),
        ("\U0001f600 ok", (" o",), "\U0001f600"),
        ("ends with the stop", ("stop",), "ends with the "),
    ],
)
def test_the_text_is_cut_exactly_at_the_stop_string(text: str, stops: tuple[str, ...], shown: str) -> None:
    deltas = assembled(list(text.encode()), TextRules(stops=stops))

    assert text_of(deltas) == shown
    assert deltas[-1].finish is (FinishReason.LENGTH if shown == text else FinishReason.STOP)
    for count in range(len(deltas)):
        assert shown.startswith(text_of(deltas[:count]))


@pytest.mark.parametrize("text", ["\U0001f600", "한국", "e\u0301", "a\U0001f469\u200d\U0001f52cb", "plain"])
def test_characters_split_over_tokens_come_whole(text: str) -> None:
    deltas = assembled(list(text.encode()), TextRules())

    assert text_of(deltas) == text


def test_a_stop_token_shows_no_text_even_when_special_tokens_do() -> None:
    deltas = assembled([104, 105, EOS], TextRules(skip_special_tokens=False), last=FinishReason.STOP)

    assert text_of(deltas) == "hi"
    assert deltas[-1].num_tokens == 3


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    rules = TextRules(stops=("x",), min_tokens=3)

    assert text_of(assembled(list(b"axaaxb"), rules)) == "axaa"
    assert text_of(assembled(list(b"axx"), rules)) == "axx"


@pytest.mark.parametrize(
    ("text", "stops"),
    list(
        itertools.product(
            ["The quick brown fox", "a\U0001f600b한", "aaaa"], [(), ("own f",), ("zz", "b"), ("aaab",)]
        )
    ),
)
def test_every_token_has_one_entry_that_comes_with_its_text_or_at_the_end(
    text: str, stops: tuple[str, ...]
) -> None:
    deltas = assembled(list(text.encode()), TextRules(stops=stops, keeps_logprobs=True))

    entries = [entry for delta in deltas for entry in delta.entries]
    num_tokens = deltas[-1].num_tokens
    assert [entry.token_id for entry in entries] == list(text.encode())[:num_tokens]
    assert [entry.text_offset for entry in entries] == sorted(entry.text_offset for entry in entries)
    shown = 0
    for delta in deltas:
        shown += len(delta.text)
        assert all(entry.text_offset <= shown for entry in delta.entries)
        assert delta.text or delta.finish is not None or not delta.entries


def test_entries_wait_for_text_that_is_held_back() -> None:
    deltas = assembled(list(b"xaay"), TextRules(stops=("aab",), keeps_logprobs=True))

    assert [(delta.text, len(delta.entries)) for delta in deltas] == [("x", 1), ("", 0), ("", 0), ("aay", 3)]


def test_an_echo_comes_first_with_the_prompts_entries() -> None:
    deltas = assembled(list(b"cd"), TextRules(echo="ab", keeps_logprobs=True))

    assert [delta.text for delta in deltas] == ["abc", "d"]
    entries = [entry for delta in deltas for entry in delta.entries]
    assert [(entry.token_id, entry.text_offset) for entry in entries] == [(97, 0), (98, 1), (99, 2), (100, 3)]
    assert entries[0].logprob is None


def test_a_prompt_only_answer_has_no_tokens() -> None:
    (delta,) = assembled(list(b"cd"), TextRules(echo="ab", keeps_logprobs=True, is_prompt_only=True))

    assert (delta.text, delta.num_tokens, delta.finish) == ("ab", 0, FinishReason.LENGTH)
    assert [entry.token_id for entry in delta.entries] == [97, 98]


def test_a_missing_logprob_is_a_bug_of_ours() -> None:
    assembler = AnswerAssembler(TOKENIZER, prompt_ids=(1,), rules=TextRules(keeps_logprobs=True))

    with pytest.raises(InternalError, match="without its log-probability"):
        assembler.push(TokenOutput(index=0, token_id=97))
