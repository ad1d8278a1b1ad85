"""Answer: the times of the chunks that carry text, of either route, and what the server says of itself."""

from __future__ import annotations

import json

import pytest

from twinpool.lab.bench.answer import Answer, kind_of

COMPLETION = [
    (1.0, {"choices": [{"text": "one", "finish_reason": None}]}),
    (1.5, {"choices": [{"text": "", "finish_reason": None}]}),  # held back: no text yet
    (2.0, {"choices": [{"text": " two", "finish_reason": None}]}),
    (2.25, {"choices": [{"text": " three", "finish_reason": "length"}]}),
    (2.5, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}),
]
CHAT = [
    (0.5, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
    (1.0, {"choices": [{"delta": {"content": "one"}, "finish_reason": None}]}),
    (2.0, {"choices": [{"delta": {"reasoning_content": " two"}, "finish_reason": None}]}),
    (2.25, {"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "stop"}]}),
    (2.5, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}),
]


@pytest.mark.parametrize("events", [COMPLETION, CHAT])
def test_first_last_and_gaps_are_those_of_chunks_with_text(events: list[tuple[float, object]]) -> None:
    answer = _fed(events)

    assert (answer.first_s, answer.last_s, answer.gaps_s) == (1.0, 2.25, [1.0, 0.25])
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 5)
    assert answer.is_complete


def test_without_a_count_of_the_server_each_chunk_with_text_is_a_token() -> None:
    answer = _fed(COMPLETION[:-1])

    assert answer.output_tokens == 3
    assert answer.prompt_tokens is None


def test_an_answer_without_any_text_came_when_it_was_finished() -> None:
    answer = _fed(
        [
            (3.0, {"choices": [{"text": "", "finish_reason": "stop"}]}),
            (3.5, {"choices": [], "usage": {"completion_tokens": 1}}),
        ]
    )

    assert (answer.first_s, answer.last_s, answer.output_tokens) == (3.0, 3.0, 1)


def test_cached_tokens_are_found_where_openai_puts_them() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}

    assert _fed([(1.0, {"choices": [], "usage": usage})]).cached_tokens == 8
    assert _fed(COMPLETION).cached_tokens == 0


def test_without_done_and_without_a_reason_to_finish_it_is_not_complete() -> None:
    assert not _fed(COMPLETION[:2], done=False).is_complete
    assert _fed(COMPLETION, done=False).is_complete
    assert _fed(COMPLETION[:2], done=True).is_complete


@pytest.mark.parametrize(
    "text",
    [
        "x",
        " ",
        '"',
        "\\",
        "\n",
        '"text": "x"',
        '"finish_reason": null',
        '"usage": {',
        '"error"',
        "\u00e9",
        "",
    ],
)
@pytest.mark.parametrize("finish", [None, "stop"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
@pytest.mark.parametrize("is_chat", [False, True])
def test_whatever_a_text_says_it_is_a_text(
    text: str, finish: str | None, separators: tuple[str, str], is_chat: bool
) -> None:
    said = {"delta": {"content": text}} if is_chat else {"text": text}
    answer = Answer()

    event = json.dumps({"choices": [said | {"finish_reason": finish}], "x": None}, separators=separators)
    answer.feed(b"data: " + event.encode() + b"\n\n", 1.0)

    assert answer.first_s == (1.0 if text else None)
    assert answer.is_complete is (finish is not None)
    assert not answer.error


def test_blanks_around_done_are_no_part_of_it() -> None:
    answer = _fed(COMPLETION[:3], done=False)

    answer.feed(b"data: [DONE] \n\n", 3.0)

    assert answer.is_done


def test_an_event_is_read_as_it_comes_where_lines_end_with_cr_alone() -> None:
    answer = Answer()

    answer.feed(_event(COMPLETION[0][1]).replace(b"\n", b"\r"), 1.0)
    answer.feed(_event(COMPLETION[2][1]), 2.0)

    assert (answer.first_s, answer.last_s) == (1.0, 2.0)


def test_an_error_in_the_stream_has_its_code_as_kind() -> None:
    answer = _fed([*COMPLETION[:2], (2.0, {"error": {"message": "x", "code": "worker_lost"}})])

    assert answer.error == "worker_lost"
    assert not answer.is_complete


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": "queue_full", "type": "rate_limit_error"}, "queue_full"),
        ({"code": None, "type": "rate_limit_error"}, "rate_limit_error"),
        ({"code": 429, "message": "x"}, "server_error"),
        ("broken", "server_error"),
    ],
)
def test_the_kind_of_an_error_is_what_comes_nearest_to_a_code(error: object, kind: str) -> None:
    assert kind_of(error) == kind


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 5, 4096])
def test_events_are_the_same_however_their_bytes_come(size: int, line_end: bytes) -> None:
    data = b": a comment\n\nevent: x\n" + b"".join(_event(event) for _, event in COMPLETION)
    data = data.replace(b"\n", line_end)
    answer = Answer()

    for start in range(0, len(data), size):
        answer.feed(data[start : start + size], float(start))

    assert len(answer.gaps_s) == 2
    assert answer.output_tokens == 5


@pytest.mark.parametrize(
    "data", [b"data: {]\n\n", b"data: 5\n\n", b'data: {"choices": 5}\n\n', b'data: {"choices": [5]}\n\n']
)
def test_an_event_that_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Answer().feed(data, 0.0)


def _fed(events: list[tuple[float, object]], *, done: bool = True) -> Answer:
    answer = Answer()
    for now_s, event in events:
        answer.feed(_event(event), now_s)
    if done:
        answer.feed(b"data: [DONE]\n\n", 9.0)
    answer.finish()
    return answer


def _event(event: object) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
