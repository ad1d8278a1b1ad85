"""A study whose every number is made up, so that what is said of it can be checked by hand.

Two workers, 1:1 against colocated, at 1 and 2 req/s: equal at 1, and at 2 req/s 1:1 has 80 % within the
limits where colocated has 60 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.metrics.limits import Limits
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.record import Record
from twinpool.lab.study.cell import FORMAT, Cell, Measurement, PoolUse
from twinpool.lab.study.laboratory import Measured
from twinpool.lab.study.settings import StudySettings
from twinpool.lab.study.stories import transfer_use

LIMITS = Limits(ttft_s=1.0, tpot_s=0.1)
BAD = {("1:1", 1.0): 0, ("colocated", 1.0): 0, ("1:1", 2.0): 4, ("colocated", 2.0): 8}  # of 20 requests
NUM_REQUESTS = 20


def settings(**changes: Any) -> StudySettings:
    given: dict[str, Any] = {
        "workers": 2,
        "ratios": ("1:1",),
        "rates": (1.0, 2.0),
        "cell_s": 10.0,
        "workload": {"kind": "synthetic", "prompt": "64", "output": "4"},
        "bench": BenchConfig(limits=LIMITS),
    }
    return StudySettings(**(given | changes))


def record(index: int, *, rate: float, ttft_s: float, tpot_s: float = 0.05) -> Record:
    due_s = index / rate
    return Record(
        index=index,
        due_s=due_s,
        sent_s=due_s,
        first_token_s=due_s + ttft_s,
        last_token_s=due_s + ttft_s + 3 * tpot_s,
        end_s=due_s + ttft_s + 3 * tpot_s,
        gaps_s=(tpot_s,) * 3,
        prompt_tokens=64,
        output_tokens=4,
    )


def story(told: Record, arm: str) -> Mapping[str, Any]:
    """A request that waits for a fifth of its time to the first token; its KV arrives 10 ms after that."""
    assert told.ttft_s is not None and told.e2e_s is not None
    spans = [
        {"name": "queue", "start_s": 0.0, "end_s": told.ttft_s / 5},
        {"name": "prefill", "start_s": told.ttft_s / 5, "end_s": told.ttft_s},
        {"name": "decode", "start_s": told.ttft_s, "end_s": told.e2e_s},
    ]
    if arm != "colocated":
        spans.append({"name": "transfer", "start_s": told.ttft_s - 0.03, "end_s": told.ttft_s + 0.01})
    return {
        "index": told.index,
        "sent_s": told.sent_s,
        "spans": spans,
        "events": [{"name": "first_token", "at_s": told.ttft_s}],
        "kv_bytes": 0 if arm == "colocated" else 2**20,
    }


def config(arm: str, **changes: Any) -> dict[str, Any]:
    roles = ("colocated", "colocated") if arm == "colocated" else ("prefill", "decode")
    return {
        "version": "0.1",
        "settings": {"threads": 1},
        "workers": {f"w{number}": {"role": role, "dtype": "float32"} for number, role in enumerate(roles)},
    } | changes


def measured(cell: Cell, *, bad: int | None = None, problems: Sequence[str] = ()) -> Measured:
    """Return a cell in which so many requests took twice the limit until the first token."""
    num_bad = BAD[(cell.arm, cell.rate)] if bad is None else bad
    records = [
        record(index, rate=cell.rate, ttft_s=2.0 if index < num_bad else 0.2 + cell.repeat / 100)
        for index in range(NUM_REQUESTS)
    ]
    stories = [story(each, cell.arm) for each in records]
    roles = ("colocated",) if cell.arm == "colocated" else ("prefill", "decode")
    busy = {"prefill": 0.9, "decode": 0.3, "colocated": 0.6}
    measurement = Measurement(
        format=FORMAT,
        cell=cell,
        taken_at="2026-01-02T03:04:05+00:00",
        config={**config(cell.arm), "load": {"rate": cell.rate, "repeat": cell.repeat}},
        problems=tuple(problems),
        bench={
            "machine": {"processor": "made up", "cores": 2},
            "server": {"model": "toy"},
            "load_before": 0.5,
            "summary": Summary(LIMITS).add_all(records).to_json(),
        },
        pools={
            role: PoolUse(
                workers=2 // len(roles),
                busy_share=busy[role],
                prompt_tokens=0 if role == "decode" else 64 * NUM_REQUESTS,
                output_tokens=NUM_REQUESTS if role == "prefill" else 4 * NUM_REQUESTS,
            )
            for role in roles
        },
        transfers=transfer_use(stories),
        stories=len(stories),
    )
    return Measured(measurement=measurement, records=records, stories=stories)
