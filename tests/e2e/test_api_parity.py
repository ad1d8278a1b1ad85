"""One API: whatever a client of OpenAI's asks, colocated and disaggregated serving answer the same JSON."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from router.http.app import create_app
from router.http.config import HTTPConfig
from router.http.model import ServedModel
from router.http.server import HTTPServer
from tests.checkpoints_toy import make_checkpoint
from tests.system import PATIENCE_S, System, system
from twinpool.engine.config import EngineConfig
from twinpool.engine.load import load_model
from twinpool.text.chat import ChatTemplate
from twinpool.text.tokenizer import Tokenizer

Json = dict[str, Any]

TALK = [{"role": "user", "content": "Tell me about the sea."}]
LONG_TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "I?"}]},
]
PROMPT = "The quick brown fox jumps over the lazy dog and keeps on running"  # longer than one chunk and block
IDS = list(range(40, 109))

# (name, endpoint, body); every case that can run streamed also does.
GOOD: list[tuple[str, str, Json]] = [
    ("text", "completions", {"prompt": PROMPT, "max_tokens": 8}),
    ("one token", "completions", {"prompt": PROMPT, "max_tokens": 1}),
    ("two tokens", "completions", {"prompt": PROMPT, "max_tokens": 2}),
    ("three tokens", "completions", {"prompt": PROMPT, "max_tokens": 3}),
    ("default length", "completions", {"prompt": IDS * 14, "temperature": 0}),
    ("token ids", "completions", {"prompt": IDS, "max_tokens": 8}),
    ("one id", "completions", {"prompt": [5], "max_tokens": 8}),
    ("prompts", "completions", {"prompt": ["abc", PROMPT, "x"], "max_tokens": 5}),
    ("lists of ids", "completions", {"prompt": [IDS, [7, 8, 9]], "max_tokens": 5}),
    ("choices", "completions", {"prompt": PROMPT, "n": 4, "seed": 1, "temperature": 1, "max_tokens": 6}),
    ("choices of prompts", "completions", {"prompt": ["a", "bc"], "n": 2, "seed": 3, "max_tokens": 4}),
    ("best of one", "completions", {"prompt": PROMPT, "best_of": 1, "max_tokens": 4, "temperature": 0}),
    ("seed", "completions", {"prompt": PROMPT, "seed": 42, "temperature": 1.3, "max_tokens": 8}),
    ("top p", "completions", {"prompt": PROMPT, "seed": 1, "top_p": 0.5, "max_tokens": 8}),
    ("top k", "completions", {"prompt": PROMPT, "seed": 1, "max_tokens": 8, "extra_body": {"top_k": 5}}),
    ("min p", "completions", {"prompt": PROMPT, "seed": 1, "max_tokens": 8, "extra_body": {"min_p": 0.2}}),
    (
        "repetition",
        "completions",
        {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "extra_body": {"repetition_penalty": 1.7}},
    ),
    ("presence", "completions", {"prompt": PROMPT, "seed": 1, "presence_penalty": 2, "max_tokens": 12}),
    ("frequency", "completions", {"prompt": PROMPT, "seed": 1, "frequency_penalty": 2, "max_tokens": 12}),
    ("bias", "completions", {"prompt": PROMPT, "temperature": 0, "logit_bias": {"65": 100}, "max_tokens": 4}),
    ("ban", "completions", {"prompt": PROMPT, "temperature": 0, "logit_bias": {"65": -100}, "max_tokens": 4}),
    ("stop", "completions", {"prompt": PROMPT, "seed": 2, "stop": ["a", "e", "i"], "max_tokens": 40}),
    (
        "stop ids",
        "completions",
        {
            "prompt": PROMPT,
            "seed": 2,
            "max_tokens": 60,
            "extra_body": {"stop_token_ids": list(range(90, 140))},
        },
    ),
    (
        "first token stops",
        "completions",
        {"prompt": PROMPT, "seed": 2, "max_tokens": 9, "extra_body": {"stop_token_ids": list(range(256))}},
    ),
    (
        "min tokens",
        "completions",
        {
            "prompt": PROMPT,
            "seed": 2,
            "max_tokens": 30,
            "extra_body": {"stop_token_ids": list(range(128)), "min_tokens": 6},
        },
    ),
    ("ignore eos", "completions", {"prompt": PROMPT, "max_tokens": 20, "extra_body": {"ignore_eos": True}}),
    ("logprobs", "completions", {"prompt": PROMPT, "logprobs": 3, "max_tokens": 6, "temperature": 0}),
    ("no alternatives", "completions", {"prompt": PROMPT, "logprobs": 0, "max_tokens": 6, "temperature": 0}),
    ("echo", "completions", {"prompt": PROMPT, "echo": True, "max_tokens": 6, "temperature": 0}),
    (
        "echo with logprobs",
        "completions",
        {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 6, "temperature": 0},
    ),
    ("prompt only", "completions", {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}),
    (
        "echo of ids",
        "completions",
        {"prompt": IDS, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0},
    ),
    ("nulls", "completions", {"prompt": PROMPT, "max_tokens": 4, "stop": None, "seed": None, "logprobs": None,
                              "temperature": 0}),
    ("empties", "completions", {"prompt": PROMPT, "max_tokens": 4, "stop": [], "logit_bias": {},
                                "temperature": 0}),
    ("user", "completions", {"prompt": PROMPT, "max_tokens": 4, "user": "someone", "temperature": 0}),
    ("special tokens shown", "completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0,
                                             "extra_body": {"skip_special_tokens": False}}),
    ("chat", "chat", {"messages": TALK, "max_tokens": 8}),
    ("chat of several turns", "chat", {"messages": LONG_TALK, "max_tokens": 8}),
    ("chat of one token", "chat", {"messages": TALK, "max_tokens": 1}),
    ("newer limit", "chat", {"messages": TALK, "max_completion_tokens": 5}),
    ("chat choices", "chat", {"messages": TALK, "n": 3, "seed": 5, "temperature": 1, "max_tokens": 6}),
    ("chat logprobs", "chat", {"messages": TALK, "logprobs": True, "top_logprobs": 3, "max_tokens": 6,
                               "temperature": 0}),
    ("chat logprobs alone", "chat", {"messages": TALK, "logprobs": True, "max_tokens": 6, "temperature": 0}),
    ("chat stop", "chat", {"messages": TALK, "stop": "e", "seed": 3, "max_tokens": 40}),
    ("chat penalties", "chat", {"messages": TALK, "temperature": 0, "presence_penalty": 1,
                                "frequency_penalty": 1, "max_tokens": 12}),
    ("chat text format", "chat", {"messages": TALK, "response_format": {"type": "text"}, "max_tokens": 4,
                                  "temperature": 0}),
]  # fmt: skip

# (name, endpoint, body, param): refused by both with the same words.
BAD: list[tuple[str, str, Json, str]] = [
    ("cold", "completions", {"prompt": "x", "temperature": -1}, "temperature"),
    ("no mass", "completions", {"prompt": "x", "top_p": 0}, "top_p"),
    ("too much mass", "completions", {"prompt": "x", "top_p": 1.5}, "top_p"),
    ("no choice", "completions", {"prompt": "x", "n": 0}, "n"),
    ("many choices", "completions", {"prompt": "x", "n": 17}, "n"),
    ("negative length", "completions", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ("best of two", "completions", {"prompt": "x", "best_of": 2}, "best_of"),
    ("no prompt", "completions", {"prompt": []}, "prompt"),
    ("negative id", "completions", {"prompt": [-1]}, "prompt"),
    ("unknown id", "completions", {"prompt": [100_000]}, "prompt"),
    ("fraction", "completions", {"prompt": [1.5]}, "prompt"),
    ("unknown bias", "completions", {"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
    ("word bias", "completions", {"prompt": "x", "logit_bias": {"abc": 1}}, "logit_bias"),
    ("empty stop", "completions", {"prompt": "x", "stop": [""]}, "stop"),
    ("too many logprobs", "completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
    ("too long", "completions", {"prompt": IDS * 20, "max_tokens": 1}, "prompt"),
    ("too much", "completions", {"prompt": "x", "max_tokens": 5000}, "max_tokens"),
    ("word seed", "completions", {"prompt": "x", "seed": "x"}, "seed"),
    (
        "transfer",
        "completions",
        {"prompt": "x", "extra_body": {"kv_transfer_params": {}}},
        "kv_transfer_params",
    ),
    ("no messages", "chat", {"messages": []}, "messages"),
    ("strong presence", "chat", {"messages": TALK, "presence_penalty": 9}, "presence_penalty"),
    ("top without logprobs", "chat", {"messages": TALK, "top_logprobs": 3}, "top_logprobs"),
    ("JSON", "chat", {"messages": TALK, "response_format": {"type": "json_object"}}, "response_format"),
]


@dataclass(frozen=True, slots=True)
class Server:
    """A deployment with its HTTP server, and OpenAI's client of it.

    One worker computes the prompts, and forgets none: so both deployments find the same prefixes.
    """

    system: System
    client: openai.OpenAI
    path: str

    def ask(self, endpoint: str, body: Json, *, stream: bool) -> list[Json]:
        """Return the JSON of the answer, or of every event of the stream."""
        create: Any = self.client.completions if endpoint == "completions" else self.client.chat.completions
        options: Json = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        raw = create.with_raw_response.create(model="toy", **body, **options)
        assert raw.headers["x-twinpool-path"] == self.path
        parsed = raw.parse()
        return sorted(map(_plain, parsed), key=_choice_of) if stream else [_plain(parsed)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = make_checkpoint(tmp_path_factory.mktemp("toy"), "llama", seed=11)
    with _EventLoop() as loop:
        stack = AsyncExitStack()
        try:
            yield [
                loop.run(_serve(stack, folder, {"colocated": 1}, "colocated")),
                loop.run(_serve(stack, folder, {"prefill": 1, "decode": 1}, "disaggregated")),
            ]
        finally:
            loop.run(stack.aclose())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("endpoint", "body"), [case[1:] for case in GOOD], ids=[case[0] for case in GOOD])
def test_both_ways_answer_the_same(servers: list[Server], endpoint: str, body: Json, stream: bool) -> None:
    body = {"seed": 0, **body}

    colocated, disaggregated = (server.ask(endpoint, body, stream=stream) for server in servers)

    assert _without_logprobs(disaggregated) == _without_logprobs(colocated)
    assert _logprobs(disaggregated) == pytest.approx(_logprobs(colocated), abs=1e-4)


@pytest.mark.parametrize(
    ("endpoint", "body", "param"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_both_ways_refuse_the_same(servers: list[Server], endpoint: str, body: Json, param: str) -> None:
    refusals = []
    for server in servers:
        with pytest.raises(openai.BadRequestError) as refusal:
            server.ask(endpoint, body, stream=False)
        refusals.append(refusal.value.body)

    assert refusals[0] == refusals[1]
    assert refusals[0]["param"] == param  # type: ignore[index]


def test_one_token_uses_no_decode_block(servers: list[Server]) -> None:
    disaggregated = servers[1]
    decode = disaggregated.system.workers[1]
    before = decode.loop.load().counters

    disaggregated.ask("completions", {"prompt": PROMPT, "max_tokens": 1}, stream=False)

    assert decode.receiver.num_open == 0
    assert decode.loop.load().counters == before


class _EventLoop:
    """An event loop in a thread, for servers that synchronous tests talk to."""

    def __enter__(self) -> _EventLoop:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


async def _serve(stack: AsyncExitStack, folder: Path, pools: dict[str, int], path: str) -> Server:
    loaded = load_model(folder, dtype="float32")
    engine = EngineConfig(max_chunk_tokens=32)
    running = await stack.enter_async_context(system(loaded, engine=engine, num_blocks=512, **pools))  # type: ignore[arg-type]
    tokenizer = Tokenizer.load(folder)
    model = ServedModel(
        name="toy",
        tokenizer=tokenizer,
        template=ChatTemplate.load(folder, tokenizer),
        vocab_size=tokenizer.vocab_size,
        max_model_tokens=loaded.spec.max_model_tokens,
        created_s=0,
    )
    config = HTTPConfig(port=0, stop_timeout_s=1.0)
    server = HTTPServer(create_app(running.router, model, config), config)
    await server.start()
    stack.push_async_callback(server.stop)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    stack.callback(client.close)
    return Server(running, client, path)


def _plain(answer: Any) -> Json:
    """Return an answer as JSON without what differs from call to call."""
    data: Json = answer.model_dump()
    for name in ("id", "created"):
        del data[name]
    return data


def _choice_of(event: Json) -> int:
    """Return which choice an event is about; choices take turns as they like, the usage comes last."""
    return int(event["choices"][0]["index"]) if event["choices"] else len(GOOD)


def _without_logprobs(events: list[Json]) -> Any:
    return _map_numbers(events, lambda number: None if isinstance(number, float) else number)


def _logprobs(events: list[Json]) -> list[float]:
    numbers: list[float] = []
    _map_numbers(events, lambda number: numbers.append(number) if isinstance(number, float) else None)
    return numbers


def _map_numbers(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: _map_numbers(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_numbers(item, change) for item in value]
    return change(value)
