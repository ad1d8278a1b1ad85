"""Same tokens: disaggregated = colocated = transformers, for every family and way to cut a prompt."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kv_transfer.config import TransferConfig
from tests.checkpoints_toy import FAMILIES, make_checkpoint
from tests.engine.references import Answer, Reference
from tests.system import System, system
from tests.toys import request
from twinpool.core.request import TokenOutput
from twinpool.engine.config import EngineConfig
from twinpool.engine.load import LoadedModel, load_model

MAX_TOKENS = 6
LOGPROB_TOLERANCE = 1e-4
CHUNKS = (7, 16, 17, 32, 0)
BLOCKS = (8, 16, 32)


@dataclass(frozen=True)
class Cut:
    """How prompts and KV are cut into pieces."""

    chunk_tokens: int
    block_tokens: int

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(
            block_tokens=self.block_tokens, max_chunk_tokens=self.chunk_tokens, max_batch_tokens=1024
        )


# Every chunk and every block size once; the slow test takes the whole product.
SOME_CUTS = (Cut(7, 8), Cut(16, 16), Cut(17, 32), Cut(32, 8), Cut(0, 16))
ALL_CUTS = tuple(itertools.starmap(Cut, itertools.product(CHUNKS, BLOCKS)))
LAYER_BY_LAYER = TransferConfig(message_bytes=1)
WHOLE = TransferConfig(message_bytes=4 * 2**20)


class Family:
    """A random checkpoint with what transformers answers to random prompts."""

    def __init__(self, folder: Path, family: str, *, num_prompts: int) -> None:
        make_checkpoint(folder, family, seed=FAMILIES.index(family))
        self.loaded: LoadedModel = load_model(folder, dtype="float32")
        rng = random.Random(family)
        lengths = [1, 2, 512, 511, *(rng.randint(1, 512) for _ in range(num_prompts - 4))]
        self.prompts = [tuple(rng.randrange(256) for _ in range(length)) for length in lengths]
        reference = Reference(folder)
        self.answers = [reference.answer(prompt, max_tokens=MAX_TOKENS) for prompt in self.prompts]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp(request.param), request.param, num_prompts=50)


@pytest.mark.parametrize("cut", SOME_CUTS, ids=str)
def test_tokens_equal_transformers_on_every_path(family: Family, cut: Cut) -> None:
    mine = range(SOME_CUTS.index(cut), len(family.prompts), len(SOME_CUTS))

    asyncio.run(_check_all_paths(family, cut, mine))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("cut", ALL_CUTS, ids=str)
def test_tokens_equal_transformers_for_all_prompts_and_all_cuts(family: Family, cut: Cut) -> None:
    asyncio.run(_check_all_paths(family, cut, range(len(family.prompts))))


async def _check_all_paths(family: Family, cut: Cut, which: Sequence[int]) -> None:
    async with system(family.loaded, colocated=1, engine=cut.engine, num_blocks=256) as colocated:
        await _check(colocated, family, which, path="colocated")
    for transfer in (LAYER_BY_LAYER, WHOLE):
        async with system(
            family.loaded, prefill=1, decode=1, engine=cut.engine, transfer=transfer, num_blocks=256
        ) as pair:
            await _check(pair, family, which, path="disaggregated")
    async with system(
        family.loaded, prefill=2, decode=2, engine=cut.engine, transport="grpc", num_blocks=256
    ) as two_and_two:
        await _check(two_and_two, family, which, path="disaggregated")


async def _check(running: System, family: Family, which: Sequence[int], *, path: str) -> None:
    requests = [
        request(family.prompts[i], max_tokens=MAX_TOKENS, ignore_eos=True, num_logprobs=0) for i in which
    ]
    answers = await asyncio.gather(*(running.follow(each) for each in requests))
    for i, (outputs, timeline) in zip(which, answers, strict=True):
        assert timeline.path == path
        _check_answer(outputs, family.prompts[i], family.answers[i])
    assert (await running.settled())["ok"]


def _check_answer(outputs: list[TokenOutput], prompt: Sequence[int], answer: Answer) -> None:
    assert [output.token_id for output in outputs] == answer.output_ids, f"{len(prompt)} tokens of prompt"
    assert [output.index for output in outputs] == list(range(MAX_TOKENS))
    for output in outputs:
        assert output.logprob is not None
        expected = float(answer.logprobs[len(prompt) + output.index - 1, output.token_id])
        assert output.logprob.logprob == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
