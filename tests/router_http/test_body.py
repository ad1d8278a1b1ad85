"""read_object: one client's large body leaves the event loop to the others."""

from __future__ import annotations

import asyncio

from starlette.types import Message

from router.http.body import read_object
from router.http.config import HTTPConfig


def test_the_event_loop_runs_while_a_large_body_is_parsed() -> None:
    body = b'{"x":[' + b",".join([b"{}"] * 1_000_000) + b"]}"

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> tuple[int, object]:
        reading = asyncio.create_task(read_object({"headers": []}, receive, HTTPConfig()))
        num_turns = 0
        while not reading.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        return num_turns, (await reading)["x"]

    num_turns, value = asyncio.run(run())

    assert num_turns > 10
    assert value == [{}] * 1_000_000
