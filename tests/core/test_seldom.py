"""A log that strangers cannot fill."""

from __future__ import annotations

import logging

import pytest

from twinpool.core.clock import ManualClock
from twinpool.core.seldom import SeldomLog


def test_a_line_comes_at_once_and_then_one_in_ten_seconds_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    seldom = SeldomLog(logging.getLogger("port"), logging.WARNING, now_s=clock.now_s)

    with caplog.at_level(logging.WARNING, "port"):
        for number in range(101):  # one in 0.25 s
            seldom.tell("stranger %d left", number)
            clock.advance(0.25)

    assert caplog.messages == [
        "stranger 0 left",
        "stranger 40 left (and 39 more like it before)",
        "stranger 80 left (and 39 more like it before)",
    ]
