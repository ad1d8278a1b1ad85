"""OwnedTasks: nothing that was started is forgotten, and cleaning up is not cut short."""

from __future__ import annotations

import asyncio

import pytest

from twinpool.core.errors import RankLost
from twinpool.core.tasks import OwnedTasks


def test_work_to_finish_goes_on_when_its_caller_is_cancelled() -> None:
    async def run() -> None:
        tasks, door, done = OwnedTasks(), asyncio.Event(), []

        async def clean_up() -> None:
            await door.wait()
            done.append("cleaned")

        calling = asyncio.ensure_future(tasks.finish(clean_up()))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert (done, len(tasks)) == ([], 1)
        door.set()
        await tasks.wait()
        assert (done, len(tasks)) == (["cleaned"], 0)

    asyncio.run(run())


def test_closing_cancels_what_runs_and_waits_for_its_end() -> None:
    async def run() -> None:
        tasks, ended = OwnedTasks(), []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                ended.append("end")

        tasks.start(work())
        await asyncio.sleep(0)
        await tasks.close()
        assert (ended, len(tasks)) == (["end"], 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(KeyError("a bug"), True), (RankLost("rank 1: killed by SIGKILL"), False)]
)
def test_what_a_background_task_raises_is_logged_and_only_a_bug_with_its_traceback(
    error: Exception, *, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        tasks = OwnedTasks()

        async def fail() -> None:
            raise error

        tasks.start(fail())
        await tasks.wait()

    asyncio.run(run())
    assert "a background task failed" in caplog.text
    assert str(error) in caplog.text
    assert ("Traceback" in caplog.text) == has_traceback
