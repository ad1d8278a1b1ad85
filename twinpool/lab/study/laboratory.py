"""Measures one cell at a running server: roles, warm-up, empty caches, the load, and what the workers say.

Knows nothing of the order of cells, nor of what was measured before.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinpool.core.config import unbind
from twinpool.core.errors import Unavailable
from twinpool.lab.bench.generator import LoadGenerator
from twinpool.lab.bench.result import BenchResult
from twinpool.lab.bench.run import run_bench_async
from twinpool.lab.machine import describe_machine
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.record import Record
from twinpool.lab.study.cell import FORMAT, Cell, Measurement, PoolUse
from twinpool.lab.study.server import StudiedServer, WorkerBooks, cold_pairs, spent
from twinpool.lab.study.settings import StudySettings
from twinpool.lab.study.stories import Story, transfer_use
from twinpool.lab.workload.workload import open_workload

_MARGIN_S = 0.2
_WARM_EACH = 3  # requests for each worker in a round of the warm-up
_WARM_ROUNDS = 8  # at most, until every pair has moved KV
_OF_A_MOMENT = ("date", "load")

OnStart = Callable[[LoadGenerator, Summary], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A cell with all of its requests."""

    measurement: Measurement
    records: Sequence[Record]
    stories: Sequence[Story]


class Laboratory:
    """A server and how it is asked.

    Args:
        settings: Of the study.
        server: Entered.
        on_start: Called when the load of a cell begins.
    """

    def __init__(self, settings: StudySettings, server: StudiedServer, *, on_start: OnStart) -> None:
        self.is_stopped = False
        self._settings = settings
        self._server = server
        self._on_start = on_start
        self._arms = {arm.name: arm for arm in settings.arms}
        self._generator: LoadGenerator | None = None

    def stop(self) -> None:
        """End the load that is being sent; what it has measured so far counts for nothing."""
        self.is_stopped = True
        if self._generator is not None:
            self._generator.stop()

    async def prepare(self, cell: Cell) -> Mapping[str, Any]:
        """Make the server one of the cell's arm, warm and with empty caches; return everything it is set to.

        Raises:
            ConfigError, Unavailable: It cannot be.
        """
        await self._server.arrange(self._arms[cell.arm])
        await self._warm_up(cell)
        await self._server.clear_caches()
        return await self._config()

    async def run(self, cell: Cell) -> Measured:
        """Send the load of the cell, for which the server was prepared, and see what became of it.

        Its config is what the server is set to afterwards, so that what changed meanwhile is found.

        Raises:
            ConfigError, Unavailable: Nothing could be measured.
        """
        records: list[Record] = []
        await self._settle()
        before = await self._server.workers()
        load = describe_machine()["load"]
        asked = replace(self._settings.bench_of(self._server.url, cell.repeat), warmup=0)
        result = await run_bench_async(
            self._settings.of_cell(cell.rate, cell.repeat),
            asked,
            api_key=self._server.api_key,
            on_record=records.append,
            on_start=self._begin,
        )
        await self._settle()
        stories = await self._stories(result, records)
        problems, pools = self._pools(cell, before, await self._server.workers(), result)
        config = await self._config()
        measurement = Measurement(
            format=FORMAT,
            cell=cell,
            taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            config={**config, "load": {"workload": dict(result.to_json()["workload"]), "seed": asked.seed}},
            problems=(*result.problems, *problems),
            bench={**result.to_json(), "load_before": load},
            pools=pools,
            transfers=transfer_use(stories),
            stories=len(stories),
        )
        return Measured(measurement=measurement, records=records, stories=stories)

    async def _warm_up(self, cell: Cell) -> None:
        """Let every worker compute and every pair of them move KV."""
        count = _WARM_EACH * self._settings.workers
        for number in range(_WARM_ROUNDS):
            if number:  # an answer of one token takes a prefill worker alone, so that turns make other pairs
                await self._send("synthetic:prompt=64,output=1,count=1", cell)
            await self._send(f"synthetic:prompt=64,output=8,arrival=at_once,count={count}", cell)
            await self._settle()
            cold = cold_pairs(await self._server.workers())
            if not cold or self.is_stopped:
                return
        pairs = ", ".join(f"{sender} to {receiver}" for sender, receiver in cold)
        raise Unavailable(f"no KV moved from {pairs} in {_WARM_ROUNDS} rounds of the warm-up")

    async def _send(self, workload: str, cell: Cell) -> None:
        result = await run_bench_async(
            open_workload(workload),
            replace(self._settings.bench_of(self._server.url, cell.repeat), cancel_share=0.0, warmup=0),
            api_key=self._server.api_key,
            on_start=self._begin,
        )
        if result.first_problem and not self.is_stopped:
            raise Unavailable(f"the warm-up was not answered: {result.first_problem}")

    async def _config(self) -> Mapping[str, Any]:
        asked = unbind(replace(self._settings.bench, url="", seed=0))
        machine = {name: value for name, value in describe_machine().items() if name not in _OF_A_MOMENT}
        return {**await self._server.config(), "bench": asked, "machine": machine}

    async def _settle(self) -> None:
        """Wait for two heartbeats: until then what workers say of themselves may be of before."""
        await asyncio.sleep(2 * await self._server.heartbeat_s() + _MARGIN_S)

    def _begin(self, generator: LoadGenerator, summary: Summary) -> None:
        self._generator = generator
        if self.is_stopped:
            generator.stop()
        self._on_start(generator, summary)

    async def _stories(self, result: BenchResult, records: Sequence[Record]) -> list[Story]:
        """Return the stories of all requests that the server still knows, the first one first."""
        known = sorted(records, key=lambda record: record.index)
        told = await self._server.stories([f"{result.run_id}-{record.index}" for record in known])
        return [
            {**story, "index": record.index, "sent_s": round(record.sent_s, 6)}
            for record, story in zip(known, told, strict=True)
            if story is not None
        ]

    def _pools(
        self, cell: Cell, before: Sequence[WorkerBooks], after: Sequence[WorkerBooks], result: BenchResult
    ) -> tuple[tuple[str, ...], Mapping[str, PoolUse]]:
        try:
            totals = spent(before, after)
        except Unavailable as error:
            return (str(error),), {}
        if sorted(worker.role for worker in after) != sorted(self._arms[cell.arm].roles()):
            return (f"the workers did not have the roles of {cell.arm}",), {}
        sizes = {role: sum(worker.role is role for worker in after) for role in totals}
        return (), {
            role.value: PoolUse(
                workers=sizes[role],
                busy_share=(
                    counted["busy_us"] / 1e6 / (result.elapsed_s * sizes[role])
                    if "busy_us" in counted
                    else None
                ),
                prompt_tokens=counted.get("prefilled_tokens", 0),
                output_tokens=counted.get("generated_tokens", 0),
            )
            for role, counted in totals.items()
        }
