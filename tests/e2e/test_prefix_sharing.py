"""Equal prefixes are computed and sent once, and no answer shows whether its prompt was warm or cold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from router.config import Fallback, RouterConfig
from tests.checkpoints_toy import make_checkpoint
from tests.system import System, system
from tests.toys import request
from twinpool.core.errors import TransferDamaged
from twinpool.core.request import Request
from twinpool.core.timeline import RequestTimeline
from twinpool.engine.config import EngineConfig
from twinpool.engine.load import LoadedModel, load_model
from twinpool.lab.shaper import LinkShape, ShapedTransport

BLOCK = 16
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 69)  # around the ends of one to four blocks
MAX_TOKENS = 4
POOLS: dict[str, dict[str, int]] = {
    "colocated": {"colocated": 1},
    "disaggregated": {"prefill": 1, "decode": 1},
}
PATIENT = RouterConfig(queue_timeout_s=60.0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=9), dtype="float32")


def asking(prompt: Sequence[int], *, max_tokens: int = MAX_TOKENS, salt: str = "", **fields: Any) -> Request:
    return replace(request(tuple(prompt), max_tokens=max_tokens, ignore_eos=True, **fields), cache_salt=salt)


def numbers(num_tokens: int, *, seed: object) -> tuple[int, ...]:
    rng = random.Random(str(seed))
    return tuple(rng.randrange(256) for _ in range(num_tokens))


async def ask(running: System, asked: Request) -> tuple[list[int], int, RequestTimeline]:
    """Return the tokens, how many of the prompt were not computed, and the story."""
    outputs, timeline = await running.follow(asked)
    assert [output.cached_tokens for output in outputs[1:]] == [0] * (len(outputs) - 1)
    assert timeline.cached_tokens == outputs[0].cached_tokens
    return [output.token_id for output in outputs], outputs[0].cached_tokens, timeline


async def cold_answers(loaded: LoadedModel, requests: Sequence[Request]) -> list[list[int]]:
    """Return what a worker answers that shares nothing."""
    config = EngineConfig(prefix_cache=False)
    async with system(loaded, colocated=1, engine=config, router=PATIENT, num_blocks=256) as alone:
        return [(await ask(alone, each))[0] for each in requests]


@pytest.mark.parametrize("chunk_tokens", [0, 7, 16])
@pytest.mark.parametrize("pools", POOLS)
def test_a_prompt_asked_three_times_has_one_answer_and_is_computed_once(
    loaded: LoadedModel, pools: str, chunk_tokens: int
) -> None:
    async def scenario() -> None:
        requests = [asking(numbers(length, seed=length)) for length in LENGTHS]
        expected = await cold_answers(loaded, requests)
        engine = EngineConfig(max_chunk_tokens=chunk_tokens)
        async with system(loaded, engine=engine, num_blocks=256, **POOLS[pools]) as running:  # type: ignore[arg-type]
            for asked, tokens in zip(requests, expected, strict=True):
                length = len(asked.prompt_ids)
                answers = [await ask(running, asked) for _ in range(3)]

                assert [answer[0] for answer in answers] == [tokens] * 3, length
                warm = (length - 1) // BLOCK * BLOCK  # the last token is always computed
                assert [answer[1] for answer in answers] == [0, warm, warm], length
            assert (await running.settled())["ok"]

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["loopback", "grpc"])
@pytest.mark.parametrize("length", [69, 64, 65])
def test_what_the_decode_worker_holds_is_not_sent(loaded: LoadedModel, transport: str, length: int) -> None:
    """Source: vllm-project/vllm PR 56640, where a request with nothing left to send was never over."""

    async def scenario() -> None:
        asked = asking(numbers(length, seed=length))
        async with system(loaded, prefill=1, decode=1, transport=transport) as pair:
            token_bytes = pair.workers[0].cache.layout.token_bytes
            stories = [(await ask(pair, asked))[2] for _ in range(3)]
            audit = await pair.settled()
            counters = pair.workers[1].receiver.counters

        tail = length % BLOCK
        assert [story.kv_bytes for story in stories] == [n * token_bytes for n in (length, tail, tail)]
        assert [story.path for story in stories] == ["disaggregated"] * 3
        reserves = [span for story in stories for span in story.spans if span.name == "reserve"]
        assert [span.detail["cached_tokens"] for span in reserves] == [0, length - tail, length - tail]
        assert counters.completed == 3
        assert audit["ok"]

    asyncio.run(scenario())


def test_a_next_turn_sends_only_what_is_new_in_it(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        turn = asking(numbers(40, seed="turn"), max_tokens=30)
        async with system(loaded, prefill=1, decode=1) as pair:
            token_bytes = pair.workers[0].cache.layout.token_bytes
            said, _, _ = await ask(pair, turn)
            next_turn = asking((*turn.prompt_ids, *said, 1, 2, 3, 4, 5), max_tokens=6)
            tokens, num_cached, story = await ask(pair, next_turn)
        (expected,) = await cold_answers(loaded, [next_turn])

        assert tokens == expected
        assert num_cached == 32  # the prefill worker has not seen the answer
        assert story.kv_bytes == (75 - 64) * token_bytes  # the decode worker wrote 69 tokens of it

    asyncio.run(scenario())


@pytest.mark.parametrize("pools", POOLS)
def test_tenants_share_nothing_not_even_in_one_process(loaded: LoadedModel, pools: str) -> None:
    async def scenario() -> None:
        prompt = numbers(64, seed="tenants")
        async with system(loaded, **POOLS[pools]) as running:  # type: ignore[arg-type]
            answers = [await ask(running, asking(prompt, salt=salt)) for salt in ("a", "b", "", "a")]

        assert [num_cached for _, num_cached, _ in answers] == [0, 0, 0, 48]
        assert len({tuple(tokens) for tokens, _, _ in answers}) == 1
        if pools == "disaggregated":
            sent = [story.kv_bytes for _, _, story in answers]
            assert sent[0] == sent[1] == sent[2] > sent[3] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("pools", POOLS)
def test_an_answer_of_one_token_and_one_with_prompt_logprobs_are_counted_rightly(
    loaded: LoadedModel, pools: str
) -> None:
    async def scenario() -> None:
        prompt = numbers(50, seed="short")
        async with system(loaded, **POOLS[pools]) as running:  # type: ignore[arg-type]
            cached = [
                (await ask(running, asked))[1]
                for asked in (
                    asking(prompt, max_tokens=1),
                    asking(prompt, max_tokens=1),
                    asking(prompt, num_prompt_logprobs=1),
                    asking(prompt),
                )
            ]

        assert cached == [0, 48, 0, 48]

    asyncio.run(scenario())


@pytest.mark.parametrize("pools", POOLS)
def test_a_crowd_that_evicts_all_the_time_gets_exact_answers(loaded: LoadedModel, pools: str) -> None:
    """Source: LMCache/LMCache PR 1835, where what was looked up was gone when it was to be used."""

    async def scenario() -> None:
        golden = numbers(70, seed="golden")
        rng = random.Random(7)
        requests = [
            asking((*golden[: rng.choice([48, 64, 70])], *numbers(rng.randint(0, 20), seed=i)), max_tokens=8)
            if i % 3 == 0
            else asking(numbers(rng.randint(1, 80), seed=i), max_tokens=8)
            for i in range(150)
        ]
        expected = await cold_answers(loaded, requests)
        gate = asyncio.Semaphore(12)

        async with system(loaded, router=PATIENT, num_blocks=24, **POOLS[pools]) as running:  # type: ignore[arg-type]

            async def one(asked: Request) -> list[int]:
                async with gate:
                    return (await ask(running, asked))[0]

            assert await asyncio.gather(*map(one, requests)) == expected
            audit = await running.settled()
            counters = [worker.loop.load().counters for worker in running.workers]

        assert audit["ok"]
        assert all(each["evicted_blocks"] >= 100 for each in counters), "nothing was evicted"
        assert all(each["prefix_hit_tokens"] >= 100 for each in counters), "nothing was found"

    asyncio.run(scenario())


def test_blocks_under_a_slow_transfer_are_not_evicted(loaded: LoadedModel) -> None:
    """Source: NVIDIA/TensorRT-LLM issue 12542, where a block was evicted before it had been sent."""

    async def scenario() -> None:
        shared = numbers(40, seed="shared")
        requests = [
            asking((*shared, *numbers(i % 7, seed=i)) if i % 2 else numbers(45, seed=i), max_tokens=6)
            for i in range(30)
        ]
        expected = await cold_answers(loaded, requests)
        slow = LinkShape(latency_s=0.05)
        async with system(
            loaded,
            prefill=1,
            decode=1,
            router=PATIENT,
            num_blocks=10,
            wrap_transport=lambda transport: ShapedTransport(transport, slow),
        ) as pair:
            answers = await asyncio.gather(*(ask(pair, asked) for asked in requests))
            assert (await pair.settled())["ok"]

        assert [tokens for tokens, _, _ in answers] == expected
        assert [story.path for _, _, story in answers] == ["disaggregated"] * 30
        assert any(num_cached for _, num_cached, _ in answers)

    asyncio.run(scenario())


def test_a_decode_pool_that_is_too_small_for_its_answers_gives_all_of_them(loaded: LoadedModel) -> None:
    """Source: sgl-project/sglang issue 6857, where a preempted request waited for its KV a second time."""

    async def scenario() -> None:
        requests = [asking(numbers(40, seed=i), max_tokens=60) for i in range(12)]
        expected = await cold_answers(loaded, requests)
        async with system(loaded, prefill=1, decode=1, router=PATIENT, num_blocks=12) as pair:
            answers = await asyncio.gather(*(ask(pair, asked) for asked in requests))
            counters = pair.workers[1].loop.load().counters
            assert (await pair.settled())["ok"]

        assert [tokens for tokens, _, _ in answers] == expected
        assert [num_cached for _, num_cached, _ in answers] == [0] * 12  # not its own KV, computed again
        assert counters["preemptions"] >= 1

    asyncio.run(scenario())


def test_what_came_in_a_damaged_transfer_is_sent_again(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        asked = asking(numbers(64, seed="damaged"), max_tokens=9)
        refusing = RouterConfig(fallback=Fallback.REFUSE)
        async with system(loaded, prefill=1, decode=1, router=refusing) as pair:
            token_bytes = pair.workers[0].cache.layout.token_bytes
            receiver = pair.workers[1].receiver
            accept = receiver.accept
            receiver.accept = lambda frame: accept(replace(frame, checksum=1))  # type: ignore[method-assign]
            with pytest.raises(TransferDamaged):
                await pair.answer(asked)
            receiver.accept = accept  # type: ignore[method-assign]

            tokens, _, story = await ask(pair, asked)
            (expected,) = await cold_answers(loaded, [asked])

        assert tokens == expected
        assert story.kv_bytes == 64 * token_bytes

    asyncio.run(scenario())


def test_a_cleared_cache_makes_prompts_cold_again(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        asked = asking(numbers(64, seed="cleared"))
        async with system(loaded, prefill=1, decode=1) as pair:
            token_bytes = pair.workers[0].cache.layout.token_bytes
            await ask(pair, asked)
            await pair.settled()
            freed = [await worker.loop.clear_cache() for worker in pair.workers]
            _, num_cached, story = await ask(pair, asked)

        assert freed == [4, 4]
        assert (num_cached, story.kv_bytes) == (0, 64 * token_bytes)

    asyncio.run(scenario())
