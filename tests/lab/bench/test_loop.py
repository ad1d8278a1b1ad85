"""The precise loop: wakes when asked to, and never before."""

from __future__ import annotations

import asyncio
import statistics

from twinpool.lab.bench.loop import precise_loop


def test_it_wakes_soon_after_the_time_and_never_before() -> None:
    async def late() -> list[float]:
        loop, found = asyncio.get_running_loop(), []
        for step in range(1, 60):
            due_s = loop.time() + step * 0.00037  # from a part of a millisecond to many
            woken = loop.create_future()
            loop.call_at(due_s, woken.set_result, None)
            await woken
            found.append(loop.time() - due_s)
        return found

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        found = runner.run(late())

    assert min(found) > -1e-6
    # Rounded up to whole milliseconds, half of them would be more than half a millisecond late.
    assert statistics.quantiles(found, n=4)[0] < 0.0004


def test_what_others_send_wakes_it_while_it_waits() -> None:
    async def echoed() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(2))

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"hi")
        async with asyncio.timeout(20.0):
            data = await reader.readexactly(2)
        writer.close()
        server.close()
        return data

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        assert runner.run(echoed()) == b"hi"
