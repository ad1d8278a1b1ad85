"""A server's end of its agent: starts it, hears how the workers are, asks it for the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Sequence

from twinpool.cluster.config import DeploymentSpec
from twinpool.cluster.pools import WorkerReport
from twinpool.cluster.roster import Member, Wanted
from twinpool.core.config import bind, unbind
from twinpool.core.errors import Unavailable

_LINE_BYTES = 2**22
_SEND_S = 5.0
_END_MARGIN_S = 30.0  # beyond the time to drain, for the ends of Ray and of every process


class AgentProcess:
    """The agent of one deployment.

    Args:
        spec: What it is told.
        say: Called with each line of progress.
    """

    def __init__(self, spec: DeploymentSpec, *, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._say = say
        self.reports: tuple[WorkerReport, ...] | None = None  # None: nothing was heard yet
        self.away = ""  # why Ray cannot be asked at the moment
        self.failure: str | None = None  # why the agent gave up
        self.changed = asyncio.Event()  # set at every piece of news; whoever waits clears it
        self._process: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it; everything else it does is heard later."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "twinpool.cluster.agent",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        await self._send(unbind(self._spec))
        self._following = asyncio.create_task(self._follow())

    async def ended(self) -> None:
        """Wait for the agent's end, which nobody asked for.

        Raises:
            Unavailable: Always: the workers end with it.
        """
        assert self._following is not None, "not started"
        await asyncio.shield(self._following)
        raise Unavailable(self.failure or "the agent ended")

    async def want(self, members: Sequence[Member]) -> None:
        """Want these workers from now on."""
        await self._send({"op": "want", **unbind(Wanted(workers=tuple(members)))})

    async def replace(self, worker_id: str) -> None:
        """Drain a worker and start its next life."""
        await self._send({"op": "replace", "worker_id": worker_id})

    async def stop(self, *, drain_s: float) -> None:
        """Drain and end every worker, then Ray, then the agent.  Idempotent."""
        if self._process is None or self._following is None:
            return
        await self._send({"op": "stop", "drain_s": drain_s})
        try:
            await asyncio.wait_for(asyncio.shield(self._following), drain_s + _END_MARGIN_S)
        except TimeoutError:
            # A closed stdin is the agent's order to end everything at once.
            self._close_stdin()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._following, _END_MARGIN_S)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        self._close_stdin()

    async def _follow(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            event = json.loads(line)
            kind, text = event["event"], event.get("text", "")
            if kind == "workers":
                self.reports = tuple(bind(WorkerReport, report) for report in event["workers"])
                self.away = ""
            elif kind == "away":
                self.away = text
                self._say(f"no dead worker is replaced for now: {text}")
            elif kind == "failed":
                self.failure = text
            elif kind == "progress":
                self._say(text)
            self.changed.set()
        code = await self._process.wait()
        if code and self.failure is None:
            self.failure = f"the agent ended with exit code {code}"
        self.changed.set()

    async def _send(self, message: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        # Its end is heard by ``_follow``; what one that is slow has not read yet waits here.
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await asyncio.wait_for(self._process.stdin.drain(), _SEND_S)

    def _close_stdin(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
