"""A thousand damaged transfers in a whole deployment: each is noticed, and none reaches an answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from kv_transfer.config import TransferConfig
from router.config import Fallback, RouterConfig
from tests.checkpoints_toy import make_checkpoint
from tests.mangling import HARMFUL, KINDS, ManglingTransport
from tests.system import System, system
from tests.toys import request
from twinpool.core.errors import TransferError
from twinpool.engine.config import EngineConfig

NUM_TRANSFERS = 1000
MAX_TOKENS = 4


async def answer_ids(deployment: System, prompt: tuple[int, ...]) -> list[int]:
    outputs = await deployment.answer(request(prompt, max_tokens=MAX_TOKENS, ignore_eos=True))
    return [output.token_id for output in outputs]


def test_no_damage_on_the_way_reaches_an_answer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", seed=5)
    rng = random.Random(7)
    prompts = [tuple(rng.randrange(1, 200) for _ in range(rng.randint(2, 69))) for _ in range(20)]
    noticed: Counter[str] = Counter()

    async def scenario() -> None:
        engine = EngineConfig(max_chunk_tokens=32, prefix_cache=False)
        one_try = RouterConfig(fallback=Fallback.REFUSE, max_attempts=1)
        async with (
            system(folder, colocated=1, engine=engine) as reference,
            system(
                folder,
                prefill=1,
                decode=1,
                engine=engine,
                router=one_try,
                transfer=TransferConfig(whole_below_tokens=100),  # several frames in each message
                wrap_transport=lambda transport: ManglingTransport(transport, rng),
            ) as pair,
        ):
            right = {prompt: await answer_ids(reference, prompt) for prompt in prompts}
            wire = pair.workers[0].transports[0]
            assert isinstance(wire, ManglingTransport)
            for number in range(NUM_TRANSFERS):
                kind, prompt = KINDS[number % len(KINDS)], rng.choice(prompts)
                wire.kind = kind
                try:
                    assert await answer_ids(pair, prompt) == right[prompt]
                except TransferError:
                    noticed[kind] += 1
                    assert kind in HARMFUL
                assert wire.kind is None
            wire.kind = None
            assert await answer_ids(pair, prompts[0]) == right[prompts[0]]
            assert (await pair.settled())["ok"]

            counters = pair.workers[1].receiver.counters
            assert wire.num_done == NUM_TRANSFERS
            assert counters.checksum_failures > NUM_TRANSFERS / len(KINDS)
            assert counters.duplicates >= NUM_TRANSFERS // len(KINDS)

    asyncio.run(scenario())

    # Swapping two frames' payloads is no damage where both are equal; nothing else can go unnoticed.
    each = NUM_TRANSFERS // len(KINDS)
    assert all(noticed[kind] >= each for kind in HARMFUL)


def test_the_comparison_sees_damage_that_nobody_checks_for(tmp_path: Path) -> None:
    """The test above can fail: without checksums swapped payloads do reach an answer."""
    folder = make_checkpoint(tmp_path, "llama", seed=5)
    rng = random.Random(7)
    prompt = tuple(range(1, 60))

    async def scenario() -> None:
        engine = EngineConfig(prefix_cache=False)
        async with (
            system(folder, colocated=1, engine=engine) as reference,
            system(
                folder,
                prefill=1,
                decode=1,
                engine=engine,
                transfer=TransferConfig(checksum=False, whole_below_tokens=100),
                wrap_transport=lambda transport: ManglingTransport(transport, rng),
            ) as pair,
        ):
            right = await answer_ids(reference, prompt)
            wire = pair.workers[0].transports[0]
            assert isinstance(wire, ManglingTransport)
            wire.kind = "swap payloads"
            with pytest.raises(AssertionError):
                assert await answer_ids(pair, prompt) == right

    asyncio.run(scenario())
