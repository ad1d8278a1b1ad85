"""Bad input is refused at once with its field's name, and no worker hears of it."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from router.config import RouterConfig
from router.http.clients import MAX_AT_ONCE
from router.http.config import HTTPConfig
from tests.router_http.toys import EOS, MAX_MODEL_TOKENS, VOCAB_SIZE, Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": MAX_MODEL_TOKENS}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 10**6}, "min_tokens"),
    ({"presence_penalty": 9}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-310}, "repetition_penalty"),  # by it, a logit is divided to infinity
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 10**4000}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(257))}, "stop_token_ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 20: 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias"),
    ({"logit_bias": {"1": None}}, "logit_bias"),
    ({"logit_bias": {"1": "5"}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(301)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": 3}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"model": 3}, "model"),
    ({"user": 3}, "user"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"features": []}, "features"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"bootstrap_room": 1}, "bootstrap_room"),
    ({"bootstrap_host": "evil"}, "bootstrap_host"),
    ({"do_remote_prefill": False}, "do_remote_prefill"),
    ({"remote_block_ids": [1]}, "remote_block_ids"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]
PROMPTS: list[tuple[Any, str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[5], [-1]]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [2147483648]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a"] * 33}, "prompt"),
    ({"prompt": "a" * MAX_MODEL_TOKENS}, "prompt"),
    ({"prompt": [7] * 2_500_000, "echo": True}, "prompt"),
    ({"prompt": [*[7] * 1_000_000, 7.5]}, "prompt"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": -1}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "echo": "yes"}, "echo"),
    ({"prompt": "a", "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
]
CHATS: list[tuple[Any, str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "a" * MAX_MODEL_TOKENS}]}, "messages"),
    ({"messages": USER * 2049}, "messages"),
    ({"messages": USER, "max_tokens": 0}, "max_tokens"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "logprobs": 3}, "logprobs"),
    ({"messages": USER, "tools": [{}]}, "tools"),
    ({"messages": USER, "tools": [{"function": {"name": "f"}}] * 129}, "tools"),
    ({"messages": USER, "continue_final_message": True}, "continue_final_message"),
    ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": USER, "chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ({"messages": USER, "echo": True}, "echo"),
]
BODIES: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"3",
    b'"x"',
    b"[]",
    b'{"prompt":"a"} x',
    b'{"prompt":"a","temperature":NaN}',
    b'{"prompt":"a","temperature":Infinity}',
    b'{"prompt":"a","temperature":1e400}',
    b'{"prompt":"a","metadata":{"x":[-1e400]}}',
    b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt":"\\ud83d"}',
    b'{"prompt":"a","stop":"\\ud83d"}',
    b'{"prompt":"a","user":"\\udc00"}',
    b'{"prompt":"\xff\xfe\x80"}',
    b'\xef\xbb\xbf{"prompt":"a"}',
    '{"prompt":"a"}'.encode("utf-16"),
    b'{"prompt":"a\x00"}',
]
CASES = (
    [(COMPLETIONS, {"prompt": "a", **extra}, param) for extra, param in BOTH]
    + [(CHAT, {"messages": USER, **extra}, param) for extra, param in BOTH]
    + [(COMPLETIONS, body, param) for body, param in PROMPTS]
    + [(CHAT, body, param) for body, param in CHATS]
    + [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": [{"role": "x", "content": "y"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ]
)


def test_a_bad_field_is_a_400_that_names_it(site: Site) -> None:
    wrong = []
    for path, body, param in CASES:
        reply = site.post(path, body)
        error = reply.json.get("error", {})
        if (reply.status, error.get("param"), error.get("type")) != (400, param, "invalid_request_error"):
            wrong.append((path, str(body)[:80], param, reply.status, error))

    assert wrong == []
    assert len(CASES) > 200
    assert site.worker.requests == []


def test_a_body_that_is_no_json_object_is_a_400(site: Site) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        for body in BODIES:
            reply = site.request("POST", path, body)
            assert reply.status == 400, (path, body[:40])
            assert reply.json["error"]["code"] in ("malformed_body", "invalid_value"), (path, body[:40])
    assert site.worker.requests == []
    assert site.post(COMPLETIONS, {"prompt": "a"}).status == 200


@pytest.mark.parametrize("field", ["prompt", "max_tokens"])
def test_what_does_not_fit_the_context_has_the_code_that_clients_look_for(site: Site, field: str) -> None:
    body = {"prompt": "a" * 600} if field == "prompt" else {"prompt": "a", "max_tokens": 600}

    error = site.post(COMPLETIONS, body).json["error"]

    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert error["message"].startswith(f"{field}: 60")


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "status"),
    [
        (MAX_MODEL_TOKENS - 1, None, 200),
        (MAX_MODEL_TOKENS - 1, 1, 200),
        (MAX_MODEL_TOKENS - 1, 2, 400),
        (MAX_MODEL_TOKENS, None, 400),
        (MAX_MODEL_TOKENS, 1, 400),
        (MAX_MODEL_TOKENS, 0, 400),
        (10 * MAX_MODEL_TOKENS, 1, 400),
        (100, MAX_MODEL_TOKENS - 100, 200),
        (100, MAX_MODEL_TOKENS - 99, 400),
    ],
)
def test_prompt_and_answer_must_fit_together(
    site: Site, prompt_tokens: int, max_tokens: int | None, status: int
) -> None:
    reply = site.post(COMPLETIONS, {"prompt": [7] * prompt_tokens, "max_tokens": max_tokens})

    assert reply.status == status


def test_ids_at_the_edge_of_the_vocabulary_are_taken(site: Site) -> None:
    reply = site.post(
        COMPLETIONS,
        {"prompt": [VOCAB_SIZE - 1, 0], "logit_bias": {str(VOCAB_SIZE - 1): -100}, "stop_token_ids": [EOS]},
    )

    assert reply.status == 200
    assert site.worker.requests[0].sampling.logit_bias == ((VOCAB_SIZE - 1, -100.0),)


def test_another_model_is_a_404(site: Site) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": USER}),
        ("/tokenize", {"prompt": "a"}),
    ):
        reply = site.post(path, {**body, "model": "gpt-4"})
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")


def test_bodies_and_headers_have_a_size(site: Site) -> None:
    big = site.request("POST", COMPLETIONS, b'{"prompt":"' + b"a" * 10_000_000 + b'"}')
    many = site.request(
        "GET", "/version", headers={f"x-{i}": "y" * 100 for i in range(90)} | {"y": "z" * 9000}
    )
    few = site.request("GET", "/version", headers={"y": "z" * 15_000})

    assert (big.status, big.json["error"]["code"]) == (413, "body_too_large")
    assert (many.status, many.json["error"]["code"]) == (431, "headers_too_large")
    assert few.status == 200


def test_no_workers_is_a_503_that_says_when_to_come_back() -> None:
    site = Site(HTTPConfig(port=0), RouterConfig(queue_timeout_s=0.05), workers=())
    try:
        reply = site.post(COMPLETIONS, {"prompt": "a"})
        stream = site.post(COMPLETIONS, {"prompt": "a", "stream": True})
        ready = site.request("GET", "/ready")
    finally:
        site.close()

    assert (reply.status, reply.json["error"]["code"], reply.headers["retry-after"]) == (
        503,
        "no_workers",
        "5",
    )
    assert stream.status == 503
    assert (ready.status, ready.json["reasons"]) == (503, ["no worker has joined"])


def test_the_largest_number_of_choices_is_answered_even_with_a_short_queue() -> None:
    site = Site(router_config=RouterConfig(max_running_per_worker=2, max_queued=MAX_AT_ONCE))
    try:
        reply = site.post(COMPLETIONS, {"prompt": ["a"] * 32, "n": 16, "max_tokens": 2})
    finally:
        site.close()

    assert (reply.status, len(reply.json["choices"])) == (200, 512)


def test_choices_that_wait_for_their_turn_are_bound_by_the_same_deadline() -> None:
    site = Site(router_config=RouterConfig(request_timeout_s=0.5))
    site.worker.delay_s = 0.1
    try:
        reply = site.post(COMPLETIONS, {"prompt": ["a"] * 32, "n": 16, "max_tokens": 4})
    finally:
        site.close()

    assert (reply.status, reply.json["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "a" * 7_000_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 7_000_000}]}, "messages"),
    ],
)
def test_megabytes_of_text_are_refused_without_being_tokenized(
    site: Site, path: str, body: dict[str, object], field: str
) -> None:
    before = psutil.Process().memory_info().rss

    error = site.post(path, body).json["error"]

    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert psutil.Process().memory_info().rss - before < 200 * 2**20  # tokenizing it takes 500 MiB
