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
from twinpool.lab.study.server import StudiedServer, WorkerBooks, spent
from twinpool.lab.study.settings import StudySettings
from twinpool.lab.study.stories import Story, transfer_use
from twinpool.lab.workload.workload import open_workload

_SETTLE_S = 1.2  # two heartbeats: until then what workers say of themselves may be of before
_WARM_EACH = 3  # requests for each worker, so that all have computed and every pair has moved KV
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
        warm_up = f"synthetic:prompt=64,output=8,arrival=at_once,count={_WARM_EACH * self._settings.workers}"
        await run_bench_async(
            open_workload(warm_up),
            replace(self._settings.bench_of(self._server.url, cell.repeat), cancel_share=0.0, warmup=0),
            api_key=self._server.api_key,
            on_start=self._begin,
        )
        await self._server.clear_caches()
        asked = unbind(replace(self._settings.bench, url="", seed=0))
        machine = {name: value for name, value in describe_machine().items() if name not in _OF_A_MOMENT}
        return {**await self._server.config(), "bench": asked, "machine": machine}

    async def run(self, cell: Cell, config: Mapping[str, Any]) -> Measured:
        """Send the load of the cell and see what became of it.

        Args:
            cell: For which the server was prepared.
            config: What it is set to.

        Raises:
            ConfigError, Unavailable: Nothing could be measured.
        """
        records: list[Record] = []
        await asyncio.sleep(_SETTLE_S)
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
        await asyncio.sleep(_SETTLE_S)
        stories = await self._stories(result, records)
        problems, pools = self._pools(before, await self._server.workers(), result)
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
        self, before: Sequence[WorkerBooks], after: Sequence[WorkerBooks], result: BenchResult
    ) -> tuple[tuple[str, ...], Mapping[str, PoolUse]]:
        try:
            totals = spent(before, after)
        except Unavailable as error:
            return (str(error),), {}
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
