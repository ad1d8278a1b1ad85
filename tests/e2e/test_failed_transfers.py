"""Every way to fail a transfer under every policy, over real workers: the exact tokens or one typed error."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from router.config import OnTransferFailure, RouterConfig
from tests.checkpoints_toy import make_checkpoint
from tests.mangling import ManglingTransport
from tests.system import System, system
from tests.toys import request
from twinpool.core.errors import TransferError
from twinpool.engine.config import EngineConfig

PROMPT = tuple(range(3, 60))
KINDS = ("flip", "truncate", "shift", "lose", "stale epoch")  # damage also where a message is one frame


async def ask(deployment: System) -> tuple[list[int], str | None]:
    question = request(PROMPT, max_tokens=6, ignore_eos=True)
    outputs, timeline = await deployment.follow(question)
    return [output.token_id for output in outputs], timeline.path


@pytest.mark.parametrize("policy", list(OnTransferFailure))
def test_a_failed_transfer_ends_as_its_policy_says_and_leaves_no_trace(
    policy: OnTransferFailure, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, "llama", seed=5)

    async def scenario() -> None:
        engine = EngineConfig(max_chunk_tokens=32, prefix_cache=False)
        async with (
            system(folder, colocated=1, engine=engine) as reference,
            system(
                folder,
                prefill=1,
                decode=1,
                engine=engine,
                router=RouterConfig(on_transfer_failure=policy),
                wrap_transport=lambda transport: ManglingTransport(transport, random.Random(7)),
            ) as pair,
        ):
            right, _ = await ask(reference)
            wire = pair.workers[0].transports[0]
            assert isinstance(wire, ManglingTransport)
            for kind in KINDS:
                wire.kind = kind
                if policy is OnTransferFailure.FAIL:
                    with pytest.raises(TransferError):
                        await ask(pair)
                else:
                    assert await ask(pair) == (right, "local")  # there is one pair only
                assert wire.kind is None, "nothing was damaged"
                assert await ask(pair) == (right, "disaggregated")
            assert (await pair.settled())["ok"]

            metrics = pair.router.metrics.render().decode()
            counted = [
                line for line in metrics.splitlines() if line.startswith("twinpool_transfer_failures_total")
            ]
            assert all(f'policy="{policy}"' in line for line in counted)
            assert sum(float(line.rpartition(" ")[2]) for line in counted) == len(KINDS)
            (book,) = pair.router.pool.handles[1].exchanges.values()
            assert (book.last_transport, book.transfers["loopback"]) == ("loopback", len(KINDS))
            assert book.failures.total() == len(KINDS)

    asyncio.run(scenario())
