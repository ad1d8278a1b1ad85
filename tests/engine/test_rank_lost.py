"""When one rank is gone, frozen or failed, no other rank waits for it longer than it should.

The deadline of a step is ten minutes where only the death itself may end the wait.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoints_toy import make_checkpoint
from tests.engine.fake_runner import FakeRunner
from tests.engine.ranks import ANSWER_S, PROMPT, Job, Led, Rank, led
from tests.engine.world import engine, prompt
from twinpool.core.clock import SystemClock
from twinpool.core.errors import InternalError, RankLost
from twinpool.engine.loop import EngineLoop
from twinpool.engine.plan import BatchPlan

NEVER_S = 600.0  # as the deadline of a step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama", num_key_value_heads=4)


def fails_with(worker: Led, *, layer_hook: object = None) -> str:
    """Run a prompt whose KV is sent away, in a thread as an engine does, and return what ends it."""
    sequence = worker.bench.sequence(PROMPT, max_tokens=4)
    sequence.has_destination = True
    with pytest.raises(RankLost) as caught:
        worker.bench.runner.run(BatchPlan((sequence.item(chunk=10_000),)), layer_hook)  # type: ignore[arg-type]
    return str(caught.value)


def assert_told_plainly(error: str) -> None:
    """Whatever gloo noticed first: one line, and none of its own source."""
    assert re.fullmatch(r"the step failed on rank 0: [A-Z][^\n/]{10,100}", error), error


@pytest.mark.parametrize("layer", [0, 1])
def test_a_rank_killed_in_mid_step_ends_all_others_at_once(folder: Path, layer: int) -> None:
    with (
        led(folder, size=4, step_timeout_s=NEVER_S, rank_2={"hangs_in_layer": layer}) as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        failing = pool.submit(fails_with, worker)
        assert worker.others[1].hears() == "hangs"

        os.kill(worker.others[1].pid, signal.SIGKILL)

        assert_told_plainly(failing.result(ANSWER_S))
        for other in (worker.others[0], worker.others[2]):
            assert other.hears().error.startswith("RankLost: ")


def test_a_frozen_rank_ends_all_others_after_the_deadline_of_a_step(folder: Path) -> None:
    with (
        led(folder, size=4, step_timeout_s=4.0, rank_3={"hangs_in_layer": 1}) as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        failing = pool.submit(fails_with, worker)
        assert worker.others[2].hears() == "hangs"

        os.kill(worker.others[2].pid, signal.SIGSTOP)

        assert_told_plainly(failing.result(ANSWER_S))
        for other in worker.others[:2]:
            assert other.hears().error.startswith("RankLost: ")


def test_a_step_that_fails_on_one_rank_fails_on_all_though_no_process_ends(folder: Path) -> None:
    with led(folder, size=4, step_timeout_s=NEVER_S, rank_1={"fails_in_layer": 1}) as worker:
        assert "the step failed on rank 0: " in fails_with(worker)

        errors = [other.hears().error for other in worker.others]

    assert errors[0] == "RankLost: the step failed on rank 1: this rank was told to fail"
    assert all(error.startswith("RankLost: ") for error in errors[1:])


def test_a_step_that_fails_on_rank_0_fails_on_all(folder: Path) -> None:
    def fail(layer: int) -> None:
        raise ValueError(f"in layer {layer}")

    with led(folder, size=2, step_timeout_s=NEVER_S) as worker:
        assert fails_with(worker, layer_hook=fail) == "the step failed on rank 0: in layer 0"
        assert worker.others[0].hears().error.startswith("RankLost: ")


@contextmanager
def led_by_a_process(folder: Path, **job: object) -> Iterator[list[Rank]]:
    """Three ranks, all of them processes, in the middle of the first step or after it."""
    common = {"folder": folder, "size": 3, "step_timeout_s": NEVER_S}
    ranks = [Rank(Job(**common, rank=0, **job))]  # type: ignore[arg-type]
    try:
        address = ranks[0].hears()
        ranks += [Rank(Job(**common, rank=rank, address=address)) for rank in (1, 2)]
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize(("hangs_in_layer", "says"), [(0, "hangs"), (None, "idle")])
def test_rank_0_killed_in_mid_step_or_between_two_ends_the_others(
    tmp_path: Path, hangs_in_layer: int | None, says: str
) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_attention_heads=6, num_key_value_heads=3, head_dim=16)

    with led_by_a_process(folder, hangs_in_layer=hangs_in_layer) as ranks:
        assert ranks[0].hears() == says

        os.kill(ranks[0].pid, signal.SIGKILL)

        for other in ranks[1:]:
            assert other.hears().error.startswith("RankLost: ")


def test_a_rank_that_dies_while_all_idle_is_noticed_by_the_next_step(folder: Path) -> None:
    with led(folder, size=2) as worker:
        worker.bench.generate(PROMPT, max_tokens=2)

        worker.others[0].close()

        assert "rank" in fails_with(worker)


def test_an_engine_whose_runner_lost_a_rank_is_over() -> None:
    def lose(plan: BatchPlan) -> None:
        raise RankLost("rank 1 is gone")

    async def story() -> InternalError:
        loop = EngineLoop(engine(FakeRunner(before_step=lose), clock=None), SystemClock())
        await loop.start()
        handle = await loop.submit(prompt(5))
        with pytest.raises(RankLost, match="rank 1 is gone") as caught:
            async for _ in handle.outputs():
                pass
        assert caught.value.retryable  # elsewhere
        failure = await asyncio.wait_for(loop.failed(), ANSWER_S)
        await loop.close()
        return failure

    failure = asyncio.run(story())
    assert (type(failure), str(failure)) == (RankLost, "rank 1 is gone")
