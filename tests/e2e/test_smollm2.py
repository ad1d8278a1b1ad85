"""The model everybody meets first answers as transformers does, on every path."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.shared import smollm2_references
from tests.system import system
from tests.toys import request
from twinpool.checkpoints.resolve import resolve_model
from twinpool.engine.load import LoadedModel, load_model


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    folder: Path = resolve_model("smollm2-135m-instruct")
    return load_model(folder, dtype="float32")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("pools", [{"colocated": 1}, {"prefill": 1, "decode": 1}], ids=str)
def test_smollm2_gives_the_reference_tokens(smollm2: LoadedModel, pools: dict[str, int]) -> None:
    items = smollm2_references()
    requests = [
        request(tuple(item["prompt_ids"]), max_tokens=len(item["greedy_ids"]), timeout_s=500.0)
        for item in items
    ]

    async def scenario() -> None:
        async with system(smollm2, **pools) as running:  # type: ignore[arg-type]
            answers = await asyncio.gather(*(running.answer(each) for each in requests))
            for item, outputs in zip(items, answers, strict=True):
                assert [output.token_id for output in outputs] == item["greedy_ids"], item["prompt"]
            assert (await running.settled())["ok"]

    asyncio.run(scenario())
