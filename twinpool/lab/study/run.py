"""A whole sitting of a study at a running server, for callers without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from twinpool.lab.bench.generator import LoadGenerator
from twinpool.lab.bench.loop import precise_loop
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.study.cell import Cell, Measurement
from twinpool.lab.study.driver import Driver, Watch
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.laboratory import Laboratory
from twinpool.lab.study.results import Results, read_results
from twinpool.lab.study.server import StudiedServer
from twinpool.lab.study.settings import StudySettings


class Unwatched:
    """Tells nobody."""

    def began(self, cell: Cell, *, done: int, total: int | None) -> None:
        pass

    def load(self, generator: LoadGenerator, summary: Summary) -> None:
        pass

    def ended(self, measurement: Measurement) -> None:
        pass


def run_study(
    settings: StudySettings,
    path: Path,
    *,
    url: str,
    api_key: str | None = None,
    watch: Watch | None = None,
    on_start: Callable[[Laboratory], None] = lambda laboratory: None,
) -> Results:
    """Measure what is not measured yet, and return everything; the server's workers get their roles back.

    Args:
        settings: What is compared, and how.
        path: Folder of the study; what is there is kept, and a run that was ended in any way goes on.
        url: Of a running Twinpool server with as many workers as the study has.
        api_key: If it asks for one.
        watch: Is told of each cell.
        on_start: Called in the event loop, with what can stop the run.

    Raises:
        ConfigError: The folder holds another study, or arms differ in more than their roles.
        StudyStopped: Somebody stopped it.
        Unavailable: The server does not answer, or a worker does not take its role.
    """
    folder = StudyFolder(path)
    with folder.held(), asyncio.Runner(loop_factory=precise_loop) as runner:
        folder.begin(settings)
        server = StudiedServer(url, api_key=api_key)
        runner.run(_measure(settings, folder, server, watch=watch or Unwatched(), on_start=on_start))
    return read_results(folder)


async def _measure(
    settings: StudySettings,
    folder: StudyFolder,
    server: StudiedServer,
    *,
    watch: Watch,
    on_start: Callable[[Laboratory], None],
) -> None:
    async with server:
        laboratory = Laboratory(settings, server, on_start=watch.load)
        on_start(laboratory)
        async with server.roles_restored():
            await Driver(settings, folder, laboratory, watch=watch).run()
