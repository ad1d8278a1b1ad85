"""The simulator: booking steps ahead changes no record, a run is the same each time, and requests add up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import astuple, replace

import pytest

from router.config import RouterConfig
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine
from twinpool.lab.record import Record
from twinpool.lab.simulate.config import Loss, Pool, RoleChange, SimulationConfig, parse_layout
from twinpool.lab.simulate.simulation import run_simulation
from twinpool.lab.workload.item import WorkItem

PROFILE = "a100-llama-3.1-8b"


def workload(num: int, *, seed: int, rate: float, has_contents: bool = False) -> Iterator[WorkItem]:
    """Prompts of 20 to 3000 tokens, answers of 1 to 300, arrivals at random."""
    draw = random.Random(seed)
    at_s = 0.0
    for index in range(num):
        at_s += draw.expovariate(rate)
        prompt = draw.randint(20, 3000)
        blocks: tuple[int, ...] = ()
        if has_contents:  # a system prompt out of three, then what nobody else has
            system = draw.randint(0, 2)
            blocks = (*(100 + system,) * 4, *(10_000 * (index + 1) + i for i in range(prompt // 100 + 1)))
        yield WorkItem(
            index=index,
            arrival_s=at_s,
            prompt_tokens=prompt,
            output_tokens=draw.choice([1, 2, draw.randint(3, 300)]),
            blocks=blocks,
            block_tokens=100 if has_contents else 0,
            tenant=draw.choice(["", "a"]),
        )


def config(layout: str, *, kv_gigabytes: float = 0.0, **engine: object) -> SimulationConfig:
    pools = tuple(
        Pool(
            role=role,
            workers=count,
            profile=PROFILE,
            kv_cache_bytes=int(kv_gigabytes * 1e9),
            engine=EngineConfig(**engine),  # type: ignore[arg-type]
        )
        for role, count in parse_layout(layout)
    )
    return SimulationConfig(pools=pools)


def records(items: Iterator[WorkItem], deployment: SimulationConfig) -> list[Record]:
    found: list[Record] = []
    run_simulation(items, deployment, on_record=found.append)
    return sorted(found, key=lambda record: record.index)


LAYOUTS = [
    ("1P1D", {}, False),
    ("2P1D", {}, True),
    ("2C", {}, False),
    ("2C", {"policy": "prefill_first"}, True),
    ("1P2D", {"kv_gigabytes": 0.5}, False),  # too little memory: preemptions, refusals, waiting
    ("2C", {"kv_gigabytes": 0.9, "max_sequences": 8}, False),
    ("1P1D1C", {"max_chunk_tokens": 100}, True),
]


@pytest.mark.parametrize(("layout", "engine", "has_contents"), LAYOUTS)
def test_every_request_fares_as_if_each_step_were_made_by_itself(
    layout: str, engine: dict[str, object], has_contents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = config(layout, **engine)  # type: ignore[arg-type]
    ahead = records(workload(150, seed=7, rate=8.0, has_contents=has_contents), deployment)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "steady_steps", lambda self: 0)
        stepped = records(workload(150, seed=7, rate=8.0, has_contents=has_contents), deployment)

    assert len(ahead) == 150
    for one, other in zip(ahead, stepped, strict=True):
        assert (one.error, one.path, one.output_tokens) == (other.error, other.path, other.output_tokens)
        assert (one.cached_tokens, one.kv_bytes) == (other.cached_tokens, other.kv_bytes)
        assert one.first_token_s == pytest.approx(other.first_token_s, abs=1e-9)
        assert one.last_token_s == pytest.approx(other.last_token_s, abs=1e-9)
        assert one.gaps_s == pytest.approx(other.gaps_s, abs=1e-9)


@pytest.mark.parametrize(("layout", "engine", "has_contents"), LAYOUTS)
def test_the_gaps_of_an_answer_lead_from_its_first_token_to_its_last(
    layout: str, engine: dict[str, object], has_contents: bool
) -> None:
    deployment = config(layout, **engine)  # type: ignore[arg-type]
    for record in records(workload(150, seed=3, rate=8.0, has_contents=has_contents), deployment):
        if record.error:
            continue
        assert record.first_token_s is not None and record.last_token_s is not None
        assert len(record.gaps_s) == record.output_tokens - 1
        assert min(record.gaps_s, default=1.0) > 0.0
        assert record.first_token_s + sum(record.gaps_s) == pytest.approx(record.last_token_s, abs=1e-9)
        assert record.queue_s is not None and 0.0 <= record.queue_s < record.first_token_s - record.due_s


def test_the_same_workload_gives_the_same_records_to_the_last_bit() -> None:
    deployment = replace(
        config("2P2D"),
        losses=(Loss(at_s=5.0, worker="decode-1", back_after_s=3.0),),
        role_changes=(RoleChange(at_s=9.0, worker="prefill-1", role=Role.DECODE),),
    )
    first, second = (records(workload(200, seed=1, rate=8.0), deployment) for _ in range(2))
    assert [astuple(record) for record in first] == [astuple(record) for record in second]


def test_a_dead_worker_costs_time_and_no_token() -> None:
    deployment = replace(config("1P2D"), losses=(Loss(at_s=6.0, worker="decode-0"),))
    found = records(workload(150, seed=5, rate=6.0), deployment)
    whole = records(workload(150, seed=5, rate=6.0), config("1P2D"))

    assert [record.error for record in found] == [""] * 150
    assert [r.output_tokens for r in found] == [r.output_tokens for r in whole]
    hurt = [
        r
        for r, w in zip(found, whole, strict=True)
        if max(r.gaps_s, default=0.0) > max(w.gaps_s, default=0.0) + 0.05
    ]
    assert hurt, "nobody noticed that a worker died"
    for record in found:
        assert len(record.gaps_s) == record.output_tokens - 1


def test_a_worker_that_changes_its_role_serves_in_the_new_one() -> None:
    deployment = replace(
        config("2P1D"), role_changes=(RoleChange(at_s=4.0, worker="prefill-1", role=Role.DECODE),)
    )
    found: list[Record] = []
    result = run_simulation(workload(150, seed=5, rate=6.0), deployment, on_record=found.append)
    uses = {use.worker: use for use in result.workers}

    assert not any(record.error for record in found)
    assert uses["prefill-1"].prefilled_tokens > 0
    assert uses["prefill-1"].decoded_tokens > 0
    assert uses["decode-0"].kv_bytes_in + uses["prefill-1"].kv_bytes_in == result.summary.kv_bytes


def test_a_role_change_that_would_leave_nobody_to_answer_is_refused() -> None:
    change = RoleChange(at_s=4.0, worker="decode-0", role=Role.PREFILL)

    with pytest.raises(
        ConfigError, match=r"role_changes: at 4 s .*decode-0 as prefill would leave no decode"
    ):
        records(workload(150, seed=5, rate=6.0), replace(config("1P1D"), role_changes=(change,)))


def test_a_worker_whose_requests_nobody_could_go_on_with_stays_what_it_is() -> None:
    """At 1 s decode-0 is to empty, at 1.5 s the other decode worker dies, and at 2 s the time is over."""
    deployment = replace(
        config("1P2D"),
        role_changes=(RoleChange(at_s=1.0, worker="decode-0", role=Role.PREFILL, timeout_s=1.0),),
        losses=(Loss(at_s=1.5, worker="decode-1"),),
    )
    items = [
        WorkItem(index=i, arrival_s=0.0, prompt_tokens=100, output_tokens=300 if i < 2 else 2)
        for i in range(4)
    ]
    items.append(WorkItem(index=4, arrival_s=6.0, prompt_tokens=100, output_tokens=2))

    found = records(iter(items), deployment)

    assert [record.error for record in found] == [""] * 5
    assert found[4].path == "disaggregated"


def test_without_anybody_to_decode_requests_end_with_the_error_of_the_router() -> None:
    deployment = replace(
        config("1P1D"),
        losses=(Loss(at_s=0.0, worker="decode-0"),),
        router=RouterConfig(queue_timeout_s=2.0, max_queued=3),
    )
    items = [
        WorkItem(index=i, arrival_s=0.25 * (i + 1), prompt_tokens=100, output_tokens=10) for i in range(6)
    ]

    found = records(iter(items), deployment)

    assert [(record.error, record.end_s) for record in found] == [
        ("no_workers", 2.25),
        ("no_workers", 2.5),
        ("no_workers", 2.75),
        ("queue_full", 1.0),
        ("queue_full", 1.25),
        ("queue_full", 1.5),
    ]
    assert {(record.output_tokens, record.queue_s) for record in found} == {(0, None)}


def test_a_request_waits_until_the_router_has_room_and_no_longer() -> None:
    """The way to the workers is no wait: there is room for one at once, and for the other when it ends."""
    deployment = replace(
        config("1P1D"), hop_s=0.25, router=RouterConfig(max_running_per_worker=1, prefill_depth=1)
    )
    items = [WorkItem(index=i, arrival_s=0.0, prompt_tokens=100, output_tokens=2) for i in range(2)]

    first, second = records(iter(items), deployment)

    assert first.queue_s == 0.0 and first.last_token_s is not None
    assert second.queue_s == pytest.approx(first.last_token_s - 0.25)


def test_a_prefix_that_is_known_is_neither_computed_nor_sent_again() -> None:
    items = [
        WorkItem(
            index=i, arrival_s=10.0 * i, prompt_tokens=1000, output_tokens=5, blocks=(1, 2), block_tokens=500
        )
        for i in range(3)
    ]
    found = records(iter(items), config("1P1D"))
    token_bytes = 131_072
    assert [record.cached_tokens for record in found] == [0, 992, 992]  # whole blocks, but the last token
    assert found[0].kv_bytes == 1000 * token_bytes
    assert found[1].kv_bytes == found[2].kv_bytes == 8 * token_bytes  # the last block is not full
    assert found[1].ttft_s is not None and found[0].ttft_s is not None
    assert found[1].ttft_s < found[0].ttft_s / 3
