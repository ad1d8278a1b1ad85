"""Answers have the shape that OpenAI's clients parse, and a stream says what the whole answer says."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.router_http.toys import BOS, EOS, MAX_MODEL_TOKENS, MODEL, Reply, Site
from twinpool.core.errors import InternalError, TransferDamaged, Untrusted

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL_HISTORY = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "r", "tool_call_id": "1", "name": None},
]
GOOD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "a"}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}),
    (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 3}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}),
    (COMPLETIONS, {"prompt": [1, 2, 3]}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "logprobs": 2}),
    (COMPLETIONS, {"prompt": "a", "n": 3, "seed": 5, "logprobs": 0}),
    (COMPLETIONS, {"prompt": "ab", "echo": True}),
    (COMPLETIONS, {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": [104, 105], "echo": True, "logprobs": 3}),
    (COMPLETIONS, {"prompt": "a", "stop": "ll"}),
    (COMPLETIONS, {"prompt": "a", "stop": ["o", "lo"], "logprobs": 1}),
    (COMPLETIONS, {"prompt": "a", "stop": "\U0001f600", "logprobs": 1}),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [108], "logprobs": 1}),
    (COMPLETIONS, {"prompt": "a", "stop": "h", "min_tokens": 2}),
    (COMPLETIONS, {"prompt": "a", "ignore_eos": True, "max_tokens": 40}),
    (COMPLETIONS, {"prompt": "a", "skip_special_tokens": False}),
    (COMPLETIONS, {"prompt": "a", "best_of": 1, "suffix": "", "logit_bias": {}, "stop": []}),
    (CHAT, {"messages": USER}),
    (CHAT, {"messages": USER, "n": 3, "max_tokens": 2}),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"messages": USER, "logprobs": True}),
    (CHAT, {"messages": USER, "stop": "llo", "logprobs": True}),
    (CHAT, {"messages": TOOL_HISTORY, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, {"messages": USER, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}),
    (CHAT, {"messages": [*USER, {"role": "assistant", "content": "he"}], "continue_final_message": True}),
]
SCRIPT = "hello \U0001f600 w\u00f6rld"


def rebuilt(reply: Reply) -> list[dict[str, Any]]:
    """Put the chunks of a stream together to choices of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for event in reply.events[:-1]:
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None, "finish": []})
            delta = part.get("delta", {})
            choice["text"] += part.get("text") or delta.get("content") or ""
            choice.setdefault("roles", []).extend([delta["role"]] if "role" in delta else [])
            choice["finish"] += [part["finish_reason"]] if part["finish_reason"] else []
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_a_stream_joined_is_the_whole_answer(site: Site, path: str, body: dict[str, Any]) -> None:
    site.worker.script = SCRIPT

    whole = site.post(path, {"seed": 1, **body})
    stream = site.post(path, {"seed": 1, **body, "stream": True})

    assert (whole.status, stream.status) == (200, 200), whole.body
    assert stream.events[-1] == "[DONE]"
    for choice, again in zip(whole.json["choices"], rebuilt(stream), strict=True):
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert again["text"] == text
        assert "\ufffd" not in text or body.get("ignore_eos")
        assert again["finish"] == [choice["finish_reason"]]
        assert again["roles"] == (["assistant"] if path == CHAT else [])
        assert again["logprobs"] == choice["logprobs"]
    assert whole.headers["x-twinpool-path"] == stream.headers["x-twinpool-path"] == "colocated"


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_usage_comes_once_at_the_end_and_only_if_asked(site: Site, path: str, body: dict[str, Any]) -> None:
    site.worker.script = SCRIPT
    usage = site.post(path, body).json["usage"]

    plain = site.post(path, {**body, "stream": True, "stream_options": {"include_usage": None}})
    asked = site.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    always = site.post(path, {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}})

    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert all("usage" not in event for event in plain.events[:-1])
    assert [event for event in asked.events[:-1] if "usage" in event] == [asked.events[-2]]
    assert (asked.events[-2]["choices"], asked.events[-2]["usage"]) == ([], usage)
    assert always.events[-2]["usage"] == usage


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_is_absent_and_unknown_fields_are_ignored(site: Site, path: str) -> None:
    nulls = (
        "model stream stream_options n max_tokens max_completion_tokens min_tokens temperature top_p top_k"
    )
    nulls += (
        " min_p repetition_penalty presence_penalty frequency_penalty logit_bias seed stop stop_token_ids"
    )
    nulls += " ignore_eos skip_special_tokens prompt_logprobs user logprobs top_logprobs echo suffix best_of"
    nulls += " tools tool_choice response_format modalities metadata store service_tier add_special_tokens"
    prompt: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    others = {
        "metadata": {"a": 1},
        "store": True,
        "service_tier": "auto",
        "x_unknown": [1],
        "cache_salt": "s",
    }

    bare = site.post(path, prompt).json["choices"]

    assert site.post(path, {**prompt, **dict.fromkeys(nulls.split())}).json["choices"] == bare
    for name in nulls.split():
        assert site.post(path, {**prompt, name: None}).json["choices"] == bare, name
    assert site.post(path, {**prompt, **others}).json["choices"] == bare


def test_each_choice_has_a_seed_of_its_own_that_depends_on_the_clients(site: Site) -> None:
    def seeds(**fields: Any) -> list[int]:
        site.worker.requests.clear()
        site.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, **fields})
        by_id = sorted(site.worker.requests, key=lambda request: request.prompt_ids)
        return [request.sampling.seed for request in by_id]

    first, again, other = seeds(seed=7), seeds(seed=7), seeds(seed=-7)

    assert sorted(first) == sorted(again) and sorted(first) != sorted(other)
    assert first.count(7) == 2 and len(set(first)) == 2
    assert set(first[:2]) == set(first[2:]), "a prompt is answered as if it came alone"
    assert len(set(seeds())) == 4
    assert 2**64 - 7 in other


def test_choices_keep_their_indices_when_they_end_at_different_times(site: Site) -> None:
    site.worker.by_prompt = {"a": "short", "b": "a much longer answer", "c": ""}
    body = {"prompt": ["a", "b", "c"], "max_tokens": 30}

    whole = site.post(COMPLETIONS, body).json["choices"]
    stream = rebuilt(site.post(COMPLETIONS, {**body, "stream": True}))

    assert [choice["text"] for choice in whole] == ["short", "a much longer answer", ""]
    assert [choice["text"] for choice in stream] == ["short", "a much longer answer", ""]


def test_a_stop_string_closes_the_generator_at_once(site: Site) -> None:
    site.worker.script = "ab" + "c" * 400

    choice = site.post(COMPLETIONS, {"prompt": "a", "stop": "cc"}).json["choices"][0]

    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert site.worker.num_tokens <= 6
    assert site.worker.num_open == 0


def test_logprobs_name_tokens_and_count_characters(site: Site) -> None:
    site.worker.script = "a\u00e9b"

    logprobs = site.post(COMPLETIONS, {"prompt": "p", "logprobs": 1}).json["choices"][0]["logprobs"]

    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b", "<eos>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] == {"a": -0.5}
    assert len(logprobs["token_logprobs"]) == 5


def test_chat_logprobs_carry_bytes(site: Site) -> None:
    site.worker.script = "\u00e9"

    body = {"messages": USER, "logprobs": True, "top_logprobs": 1}
    first = site.post(CHAT, body).json["choices"][0]["logprobs"]["content"][0]

    assert first["bytes"] == [0xC3]
    assert first["top_logprobs"] == [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}]


def test_prompt_logprobs_are_vllms(site: Site) -> None:
    choice = site.post(COMPLETIONS, {"prompt": "ab", "prompt_logprobs": 1}).json["choices"][0]

    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]


def test_an_error_before_the_first_token_has_a_status(site: Site) -> None:
    site.worker.error_at, site.worker.error = 0, InternalError("secret detail")

    for stream in (False, True):
        reply = site.post(COMPLETIONS, {"prompt": "a", "stream": stream})
        assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
        assert b"secret" not in reply.body
        assert reply.headers["x-twinpool-path"] == "colocated; failed=InternalError"


@pytest.mark.parametrize(
    "error", [InternalError("secret"), RuntimeError("secret"), TransferDamaged("secret")]
)
def test_an_error_after_the_first_token_is_an_event_and_no_good_end(site: Site, error: Exception) -> None:
    site.worker.error_at, site.worker.error = 3, error

    reply = site.post(CHAT, {"messages": USER, "stream": True, "n": 2})

    assert reply.status == 200
    assert reply.events[-1]["error"]["type"] in ("server_error", "service_unavailable_error")
    assert [event for event in reply.events if event == "[DONE]"] == []
    finishes = [part["finish_reason"] for event in reply.events[:-1] for part in event["choices"]]
    assert set(finishes) == {None}
    assert b"secret" not in reply.body


@pytest.mark.parametrize("error_at", [0, 3])
def test_what_a_client_is_not_told_is_in_the_log(
    site: Site, caplog: pytest.LogCaptureFixture, error_at: int
) -> None:
    site.worker.error_at, site.worker.error = error_at, Untrusted("security.secret_file", "the clocks differ")

    reply = site.post(COMPLETIONS, {"prompt": "a", "stream": True}, {"x-request-id": "of-a-client"})

    assert b"clocks" not in reply.body
    assert caplog.messages == [
        "request of-a-client failed: Untrusted: security.secret_file: the clocks differ"
    ]


def test_one_failing_choice_fails_the_whole_answer(site: Site) -> None:
    site.worker.error_at, site.worker.error = 3, InternalError("no")
    site.worker.by_prompt = {"short": "ab"}

    reply = site.post(COMPLETIONS, {"prompt": ["short", "long"]})

    assert reply.status == 500
    assert site.worker.num_open == 0


def test_bos_is_there_once(site: Site) -> None:
    chat = site.post("/tokenize", {"messages": USER}).json["tokens"]
    text = site.post("/tokenize", {"prompt": "<bos>user: hi\nassistant: "}).json["tokens"]

    assert chat == text
    assert chat.count(BOS) == 1
    assert site.post("/detokenize", {"tokens": [104, EOS]}).json == {"prompt": "h<eos>"}


def test_the_clients_request_id_is_echoed_and_finds_its_request(site: Site) -> None:
    reply = site.post(COMPLETIONS, {"prompt": "a"}, {"X-Request-Id": "mine-1"})
    odd = site.post(COMPLETIONS, {"prompt": "a"}, {"X-Request-Id": 'a"b c'})
    found = site.request("GET", "/admin/requests/mine-1").json

    assert reply.headers["x-request-id"] == "mine-1"
    assert odd.headers["x-request-id"].startswith("req-")
    assert (found["id"], found["path"], found["outcome"]) == ("mine-1", "colocated", "stop")
    assert len({request.request_id for request in site.worker.requests}) == 2
    assert "mine-1" not in {request.request_id for request in site.worker.requests}


def test_the_official_client_understands_everything(site: Site) -> None:
    site.worker.script = SCRIPT
    with openai.OpenAI(base_url=f"http://127.0.0.1:{site.port}/v1", api_key="x", max_retries=0) as client:
        text = client.completions.create(model=MODEL, prompt="a", logprobs=2, max_tokens=5)
        chat = client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
        stream = client.chat.completions.create(
            model=MODEL,
            messages=USER,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        models = [model.id for model in client.models.list()]
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL, prompt="a", temperature=3)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        site.worker.error_at, site.worker.error = 2, InternalError("no")
        with pytest.raises(openai.APIError, match="the server failed"):
            list(client.completions.create(model=MODEL, prompt="a", stream=True))

    assert text.choices[0].text == "hello"
    assert chat.choices[0].message.content == SCRIPT
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SCRIPT
    assert chunks[-1].usage == chat.usage
    assert models == [MODEL]
    assert refused.value.param == "temperature"


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})])
def test_token_ids_come_whole_and_in_order_if_asked(site: Site, path: str, body: dict[str, Any]) -> None:
    asked = {**body, "max_tokens": 6, "return_token_ids": True}

    (whole,) = site.post(path, asked).json["choices"]
    streamed = [
        token_id
        for event in site.post(path, {**asked, "stream": True}).events[:-1]
        for choice in event["choices"]
        for token_id in choice.get("token_ids", [])
    ]

    assert len(whole["token_ids"]) == 6
    assert streamed == whole["token_ids"]
    assert "token_ids" not in site.post(path, body).json["choices"][0]


def test_a_completion_without_a_limit_is_16_tokens_and_a_chat_what_is_left(site: Site) -> None:
    site.worker.script = "a" * 1000

    completion = site.post(COMPLETIONS, {"prompt": "a"}).json
    chat = site.post(CHAT, {"messages": [{"role": "user", "content": "a"}]}).json

    assert completion["usage"]["completion_tokens"] == 16
    assert chat["usage"]["total_tokens"] == MAX_MODEL_TOKENS
