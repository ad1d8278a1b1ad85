"""What a study is asked for is checked by name, and its cells send what their rate says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.made_up import settings
from twinpool.core.config import bind, unbind
from twinpool.core.errors import ConfigError, Unavailable
from twinpool.core.ports import Role
from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.study.arm import Arm, all_ratios, read_arms
from twinpool.lab.study.server import WorkerBooks, assign, cold_pairs, spent
from twinpool.lab.study.settings import StudySettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratios": ("1-1",)}, r"study\.ratios: '1-1' is not PREFILL:DECODE"),
        ({"ratios": ("0:2",)}, r"study\.ratios: 0:2 leaves a pool without workers"),
        ({"ratios": ("1:2",)}, r"study\.ratios: 1:2 has 3 workers, and there are 2"),
        ({"ratios": ("1:1", "1:1")}, r"study\.ratios: 1:1 stands twice"),
        ({"ratios": (), "colocated": False}, r"study\.ratios: names no arm"),
        ({"workers": 0}, r"study\.workers: 0 is less than 1"),
        ({"rates": ()}, r"study\.rates: give rates or a search"),
        ({"rates": (1.0, 1.0)}, r"study\.rates: a rate stands twice"),
        ({"rates": (-1.0,)}, r"study\.rates: -1 is not above 0"),
        ({"repeats": 0}, r"study\.repeats: 0 is less than 1"),
        ({"cell_s": 0.0}, r"study\.cell_s: 0 is not above 0"),
        ({"bench": BenchConfig()}, r"study\.bench\.limits: goodput needs limits"),
        ({"workload": {"kind": "synthetic", "prompt": "none"}}, r"workload\.prompt: "),
        ({"workload": {"kind": "synthetic", "arrival": "at_once"}}, r"study\.workload: has no two requests"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_settings_survive_being_written_down() -> None:
    asked = settings()

    assert bind(StudySettings, unbind(asked), "study") == asked


def test_a_cell_sends_its_rate_for_its_time() -> None:
    items = list(settings(cell_s=50.0).of_cell(4.0, repeat=0))

    assert len(items) == 200
    span_s = items[-1].arrival_s - items[0].arrival_s
    assert 199 / span_s == pytest.approx(4.0), "the mean rate is exact, whatever was drawn"


def test_equal_gaps_are_those_of_the_rate() -> None:
    asked = settings(workload={"kind": "synthetic", "arrival": "constant(1)"}, cell_s=4.0)

    assert [item.arrival_s for item in asked.of_cell(2.0, repeat=0)] == [number / 2 for number in range(8)]


def test_repeats_of_a_file_send_what_follows_in_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"index": n, "arrival_s": n * 1.0, "prompt_tokens": n + 1, "output_tokens": 2} for n in range(30)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    asked = settings(workload={"kind": "trace", "path": str(path)}, rates=(1.0,))

    cells = [list(asked.of_cell(1.0, repeat)) for repeat in range(3)]

    assert [[item.prompt_tokens for item in cell] for cell in cells] == [
        list(range(first, first + 10)) for first in (1, 11, 21)
    ]
    assert all([item.arrival_s for item in cell] == list(map(float, range(10))) for cell in cells)
    assert all([item.index for item in cell] == list(range(10)) for cell in cells)
    with pytest.raises(
        ConfigError, match=r"^study\.workload: has 0 requests left for repeat 4 at 1 req/s, which sends 10$"
    ):
        settings(workload={"kind": "trace", "path": str(path)}, rates=(1.0,), repeats=4)


def test_other_rates_are_the_same_requests_and_other_repeats_are_others() -> None:
    def of(rate: float, repeat: int) -> list[tuple[int, float]]:
        asked = settings(workload={"kind": "synthetic", "prompt": "uniform(1, 1000)", "seed": 5})
        items = asked.of_cell(rate, repeat)
        return [(item.prompt_tokens, item.arrival_s * rate) for item in items][:8]

    one, twice = of(1.0, 0), of(2.0, 0)
    assert [tokens for tokens, _ in one] == [tokens for tokens, _ in twice]
    assert of(1.0, 0) == of(1.0, 0) != of(1.0, 1)


def test_ratios_are_all_ways_to_divide() -> None:
    assert all_ratios(4) == ("1:3", "2:2", "3:1")
    arms = read_arms(all_ratios(4), workers=4, colocated=True)
    assert [arm.name for arm in arms] == ["1:3", "2:2", "3:1", "colocated"]
    assert {arm.workers for arm in arms} == {4}


def test_as_few_workers_as_possible_change() -> None:
    prefill, decode, both = Role.PREFILL, Role.DECODE, Role.COLOCATED

    assert assign([both] * 3, Arm(prefill=1, decode=2)) == (prefill, decode, decode)
    assert assign([prefill, decode, decode], Arm(prefill=2, decode=1)) == (prefill, decode, prefill)
    assert assign([decode, prefill, decode], Arm(colocated=3)) == (both, both, both)
    assert assign([decode, prefill], Arm(prefill=1, decode=1)) == (decode, prefill)


def books(worker_id: str, role: Role, *, generation: int = 1, **counters: int) -> WorkerBooks:
    return WorkerBooks(worker_id=worker_id, role=role, generation=generation, config={}, counters=counters)


def test_what_a_pool_spent_is_the_sum_of_its_workers() -> None:
    before = [
        books("a", Role.DECODE, busy_us=5),
        books("b", Role.DECODE, busy_us=7),
        books("c", Role.PREFILL),
    ]
    after = [
        books("a", Role.DECODE, busy_us=15, steps=1),
        books("b", Role.DECODE, busy_us=8),
        books("c", Role.PREFILL, steps=3),
    ]

    assert spent(before, after) == {Role.DECODE: {"busy_us": 11, "steps": 1}, Role.PREFILL: {"steps": 3}}


def test_a_role_that_changed_makes_a_cell_void() -> None:
    with pytest.raises(Unavailable, match="worker a was decode and is prefill now"):
        spent([books("a", Role.DECODE)], [books("a", Role.PREFILL)])


def test_pairs_are_cold_until_kv_moved() -> None:
    workers = [books("p", Role.PREFILL), books("d", Role.DECODE), books("e", Role.DECODE)]
    assert cold_pairs(workers) == (("p", "d"), ("p", "e"))

    workers[1] = replace(workers[1], senders=frozenset({"p"}))
    assert cold_pairs(workers) == (("p", "e"),)
    assert cold_pairs([books("c", Role.COLOCATED), books("d", Role.COLOCATED)]) == ()


def test_a_worker_that_was_replaced_makes_a_cell_void() -> None:
    with pytest.raises(Unavailable, match="worker a began another life meanwhile"):
        spent([books("a", Role.DECODE)], [books("a", Role.DECODE, generation=2)])
    with pytest.raises(Unavailable, match="worker b left meanwhile"):
        spent([books("a", Role.DECODE), books("b", Role.DECODE)], [books("a", Role.DECODE)])
