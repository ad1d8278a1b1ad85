"""Workers of one machine: each end of a step is where a hand finds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.recommend.tables import write_profile
from twinpool.core.config import to_yaml
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.lab.profile.polynomial import Polynomial
from twinpool.lab.profile.profile import load_profile
from twinpool.lab.profile.slowdown import Slowdown
from twinpool.lab.record import Record
from twinpool.lab.simulate.config import Pool, SimulationConfig, Transfer, parse_layout
from twinpool.lab.simulate.machine import Machine
from twinpool.lab.simulate.simulation import run_simulation
from twinpool.lab.simulate.timetable import Timetable
from twinpool.lab.workload.item import WorkItem

SLOWDOWN = Slowdown(prompts=(1.0, 1.25, 2.0), decodes=(1.0, 1.5, 3.0))


def test_a_step_takes_longer_as_long_as_another_one_runs() -> None:
    timetable, ends = Timetable(), {}
    machine = Machine(Slowdown(prompts=(1.0, 2.0), decodes=(1.0, 2.0)), timetable)

    def begin(name: str, work_s: float) -> None:
        machine.begin(work_s, lambda: ends.update({name: timetable.now_s()}), has_prompt=False)

    timetable.at(0.0, lambda: begin("long", 3.0))
    timetable.at(1.0, lambda: begin("short", 0.5))
    timetable.run()

    # Alone for 1 s; then both at half their pace until 0.5 s of work are done; then 1.5 s alone.
    assert ends == {"short": pytest.approx(2.0), "long": pytest.approx(3.5)}


def test_prompts_and_decodes_are_slowed_down_by_their_own_measure() -> None:
    timetable, ends = Timetable(), {}
    machine = Machine(Slowdown(prompts=(1.0, 2.0), decodes=(1.0, 1.25)), timetable)

    def begin(name: str, work_s: float) -> None:
        machine.begin(work_s, lambda: ends.update({name: timetable.now_s()}), has_prompt=name == "prompt")

    timetable.at(0.0, lambda: begin("prompt", 3.0))
    timetable.at(1.0, lambda: begin("decode", 0.8))
    timetable.run()

    # The prompt is alone for 1 s; then 0.8 s of decode take 1 s, in which it gets 0.5 s; then 1.5 s alone.
    assert ends == {"decode": pytest.approx(2.0), "prompt": pytest.approx(3.5)}


def test_beyond_what_was_measured_the_cores_are_shared() -> None:
    assert [SLOWDOWN.of(busy, has_prompt=True) for busy in (1, 2, 3, 6)] == [1.0, 1.25, 2.0, 4.0]
    assert [SLOWDOWN.of(busy, has_prompt=False) for busy in (1, 2, 3, 6)] == [1.0, 1.5, 3.0, 6.0]


def records_of(tmp_path: Path, workers: int, items: list[WorkItem]) -> list[Record]:
    """Simulate a worker that takes 1 s for a prompt and 0.1 s for a token, on a machine of ``SLOWDOWN``."""
    times = Polynomial(prefill=(1.0, 0.0, 0.0), decode=(0.1, 0.0, 0.0))
    profile = replace(
        load_profile("a100-opt-13b"), polynomial=times, slowdown=SLOWDOWN, hop_s=0.005, measured=None
    )
    path = tmp_path / "profile.yaml"
    path.write_text(to_yaml(profile))
    records: list[Record] = []
    pools = (Pool(role=Role.COLOCATED, workers=workers, profile=str(path)),)
    run_simulation(items, SimulationConfig(pools=pools), on_record=records.append)
    return sorted(records, key=lambda record: record.index)


@pytest.mark.parametrize(("workers", "prompt", "decode"), [(1, 1.0, 1.0), (2, 1.25, 1.5), (3, 2.0, 3.0)])
def test_workers_of_one_machine_slow_each_other_down(
    tmp_path: Path, workers: int, prompt: float, decode: float
) -> None:
    items = [
        WorkItem(index=number, arrival_s=0.0, prompt_tokens=16, output_tokens=3) for number in range(workers)
    ]

    for record in records_of(tmp_path, workers, items):
        assert record.first_token_s == pytest.approx(0.01 + 1.0 * prompt)
        assert record.gaps_s == pytest.approx([0.1 * decode] * 2)


def test_kv_is_whole_no_sooner_than_it_was_computed_though_a_neighbour_ended(tmp_path: Path) -> None:
    """The second prompt begins at 0.9 s beside the first, at half its pace, which would take until 2.9 s.

    The first ends at 1.1 s, so it takes until 2 s.  Its first layer was expected at 1.4 s, and from then on
    the link, on which its KV takes 10 s, has enough to do.
    """
    profile = write_profile(
        tmp_path,
        "toy",
        prefill=(1.0, 0.0, 0.0),
        decode=(1e-6, 0.0, 0.0),
        slowdown={"prompts": [1.0, 2.0, 2.0], "decodes": [1.0, 2.0, 2.0]},
        model={
            "name": "toy",
            "num_layers": 4,
            "num_kv_heads": 1,
            "head_dim": 64,
            "max_tokens": 8192,
            "dtype": "float16",
        },
    )
    pools = tuple(Pool(role=role, workers=n, profile=profile) for role, n in parse_layout("2P2D"))
    records: list[Record] = []

    run_simulation(
        [
            WorkItem(index=0, arrival_s=0.0, prompt_tokens=100, output_tokens=1),
            WorkItem(index=1, arrival_s=0.9, prompt_tokens=100, output_tokens=2),
        ],
        SimulationConfig(pools=pools, transfer=Transfer(bytes_s=100 * 4 * 256 / 10.0, latency_s=0.0)),
        on_record=records.append,
    )

    second = max(records, key=lambda record: record.index)
    assert second.first_token_s == pytest.approx(2.0)
    assert second.last_token_s == pytest.approx(1.4 + 10.0, abs=0.01)


@pytest.mark.parametrize(
    ("slowdown", "problem"),
    [((1.1, 1.2), "is not 1 of one"), ((1.0,), "is not 1 of one"), ((1.0, 2.0, 1.5), "is less of more")],
)
@pytest.mark.parametrize("name", ["prompts", "decodes"])
def test_a_slowdown_that_cannot_be_is_refused(slowdown: tuple[float, ...], problem: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"slowdown.{name}: {problem}"):
        replace(SLOWDOWN, **{name: slowdown})
