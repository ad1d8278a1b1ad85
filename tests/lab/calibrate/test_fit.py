"""From measured times to a profile: a known machine is found again, to the last digit that floats have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twinpool.core.config import to_yaml
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.engine.load import ModelSpec
from twinpool.lab.calibrate.calibration import Calibration
from twinpool.lab.calibrate.config import CalibrateConfig
from twinpool.lab.calibrate.fit import fit_serving, fit_times, rising
from twinpool.lab.calibrate.points import StepTiming, grid
from twinpool.lab.calibrate.serving import Served
from twinpool.lab.calibrate.steps import EngineTimes
from twinpool.lab.calibrate.transfers import TransferTiming, fit_link
from twinpool.lab.profile.polynomial import Polynomial
from twinpool.lab.profile.profile import load_profile
from twinpool.lab.record import Record
from twinpool.lab.simulate.config import Pool, SimulationConfig, Transfer
from twinpool.lab.simulate.simulation import run_simulation
from twinpool.lab.workload.item import WorkItem

# 10 ms a step; 2 ms a token and 1 us a pair of a prompt; 3 ms a sequence and 1 us a token of context.
MACHINE = Polynomial(prefill=(0.01, 0.002, 5e-7), decode=(0.01, 1e-6, 0.003)).cost_model()
STEPS = tuple(
    StepTiming(point=point, seconds=(point.predicted_s(MACHINE),)) for point in grid(CalibrateConfig())
)
# A prompt of 128 takes 10 + 256 + 8.192 ms, a decode at 128 + 12 tokens 13.14 ms, a prompt of 8 26.032 ms.
SERVED = Served(
    short_tokens=8,
    short_ttft_s=0.026032 + 0.002 + 2 * 0.004,
    prompt_tokens=128,
    output_tokens=24,
    ttft_s=(0.274192 + 0.008, 0.274192 * 1.5 + 0.008, 0.274192 * 2 + 0.008),
    gap_s=(0.01314 + 0.002, 0.01514 * 1.5, 0.01514 * 4.5),
    beside_s=(0.274192 + 0.008, 0.274192 * 1.7 + 0.008, 0.274192 * 3 + 0.008),
)
TRANSFERS = tuple(
    TransferTiming(transport="shm", num_bytes=size, seconds=0.001 + size / 2e9)
    for size in (10_000, 100_000, 1_000_000)
)


def calibration(served: Served | None = SERVED) -> Calibration:
    spec = ModelSpec(
        architecture="llama",
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        max_model_tokens=2048,
        vocab_size=262,
        sampling_vocab_size=262,
        eos_ids=(),
        dtype="float32",
        fingerprint={},
    )
    versions = {"twinpool": "0.1.0"}
    return Calibration(
        config=CalibrateConfig(workers=3, threads=1),
        engine=EngineTimes(spec=spec, kv_cache_bytes=512 * 4096, steps=STEPS),
        transfers=(*TRANSFERS, TransferTiming(transport="nixl", num_bytes=10_000, problem="skipped: none")),
        served=served,
        machine={
            "date": "2026-01-02T03:04:05+00:00",
            "processor": "a processor",
            "cores": 2,
            "load": 0.5,
            "system": "Linux 6",
            "python": "3.11",
            "versions": versions,
        },
    )


@pytest.mark.parametrize("timing", STEPS, ids=lambda timing: timing.point.name)
def test_the_fit_meets_every_step_of_a_known_machine_and_predicts_the_others(timing: StepTiming) -> None:
    assert abs(timing.error(fit_times(STEPS).cost_model())) < 1e-9


def test_checks_are_steps_that_the_profile_is_not_made_of() -> None:
    checks = [timing for timing in STEPS if timing.point.is_check]
    times = fit_times([*(timing for timing in STEPS if not timing.point.is_check)])

    assert [timing.point.name for timing in checks] == [
        "1 x 384 tokens",
        "1 x 128 tokens + 12 decodes at 384",
        "1 x 512 tokens after 256",
        "12 decodes at 384",
    ]
    assert times == fit_times(STEPS)


def test_a_longer_prompt_that_took_less_is_noise_and_shares_the_mean() -> None:
    swapped = [STEPS[0], replace(STEPS[1], seconds=(0.3,)), replace(STEPS[2], seconds=(0.2,)), *STEPS[3:]]

    assert [row[3] for row in fit_times(swapped).prefill[:3]] == pytest.approx(
        [STEPS[0].median_s, 0.25, 0.25]
    )
    assert rising([1.0, 4.0, 3.0, 2.0, 5.0]) == [1.0, 3.0, 3.0, 3.0, 5.0]


def test_what_serving_adds_is_found_beside_the_steps() -> None:
    costs = fit_serving(SERVED, fit_times(STEPS).cost_model())

    assert costs.step_s == pytest.approx(0.002)
    assert costs.hop_s == pytest.approx(0.004)
    # A prompt takes 1.5 times as long beside another and 1.7 beside a decode, 1.6 in the mean.
    assert costs.slowdown is not None and costs.slowdown.prompts == pytest.approx((1.0, 1.6, 2.5))
    assert costs.slowdown.decodes == pytest.approx((1.0, 1.5, 4.5))


def test_noise_that_makes_more_workers_faster_is_not_believed() -> None:
    served = replace(SERVED, gap_s=(0.01514, 0.01514 * 0.9, 0.01514 * 1.2))

    slowdown = fit_serving(served, fit_times(STEPS).cost_model()).slowdown
    assert slowdown is not None and slowdown.decodes == pytest.approx((1.0, 1.0, 1.2))


def test_a_link_is_the_line_through_its_transfers() -> None:
    link = fit_link(TRANSFERS)

    assert link.latency_s == pytest.approx(0.001)
    assert link.bytes_s == pytest.approx(2e9)


def test_a_larger_transfer_that_is_no_slower_has_no_latency() -> None:
    link = fit_link([replace(TRANSFERS[0], seconds=0.002), replace(TRANSFERS[2], seconds=0.001)])

    assert (link.latency_s, link.bytes_s) == (0.0, pytest.approx(1e9))


def test_a_written_profile_loads_says_where_it_is_from_and_simulates(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(to_yaml(calibration().profile(command="twinpool calibrate --workers 3")))

    profile = load_profile(str(path))
    records: list[Record] = []
    pools = tuple(Pool(role=role, workers=1, profile=str(path)) for role in (Role.PREFILL, Role.DECODE))
    items = [WorkItem(index=0, arrival_s=0.0, prompt_tokens=128, output_tokens=2)]
    config = SimulationConfig(pools=pools, transfer=Transfer(link="shm"))
    run_simulation(items, config, on_record=records.append)

    assert "`twinpool calibrate --workers 3` on 2026-01-02T03:04:05+00:00" in profile.source
    assert (
        "twinpool 0.1.0" in profile.engine
        and profile.hardware == "a processor, 2 cores, 1 of them for a worker"
    )
    assert set(profile.transfers) == {"shm"} and profile.slowdown == calibration().costs.slowdown
    # Four ways of 4 ms (reserve, its answer, prefill, its answer) and a step that serving makes 2 ms longer.
    assert records[0].ttft_s == pytest.approx(4 * 0.004 + 0.274192 + 0.002)
    assert records[0].kv_bytes == 128 * 512  # a token: 2 layers x key and value x 2 heads x 16 x 4 bytes


def test_a_calibration_says_how_many_of_its_steps_were_unsteady() -> None:
    found = calibration()
    # Of 1, 2, 3, 4, 5 the middle half is from 2 to 4, two thirds of the median.
    noisy = [replace(timing, seconds=(1.0, 2.0, 3.0, 4.0, 5.0)) for timing in STEPS[:2]]
    told = replace(found, engine=replace(found.engine, steps=(*noisy, *STEPS[2:])))

    assert noisy[0].spread == pytest.approx(2 / 3)
    assert (found.unsteady_share, told.unsteady_share) == (0.0, pytest.approx(2 / len(STEPS)))


def test_without_a_server_a_profile_has_steps_and_transfers_alone() -> None:
    profile = calibration(served=None).profile(command="c")

    assert (profile.hop_s, profile.slowdown) == (0.0, None)
    assert profile.measured == fit_times(STEPS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repeats": 0}, "calibrate.repeats: 0 is less than 1"),
        ({"workers": -1}, "calibrate.workers: -1 is less than 0"),
        ({"threads": 0}, "calibrate.threads: 0 is less than 1"),
        ({"prompts": (8,)}, "calibrate.prompts: are less than two"),
        ({"prompts": (64, 8)}, r"calibrate.prompts: \[64, 8\] do not grow from 1"),
        ({"prompts": (8, 513)}, "calibrate.prompts: 513 are more than the 512 of a step"),
        ({"prompt_batches": (17,)}, "calibrate.prompt_batches: 17 prompts of 128 are more"),
        ({"contexts": (2, 32)}, r"calibrate.contexts: \[2, 32\] do not grow from 3"),
        ({"contexts": ()}, "calibrate.contexts: are missing"),
        ({"decode_batches": (64,)}, "calibrate.decode_batches: 64 leave no room in the 64"),
        ({"cached": (250,)}, "calibrate.cached: 250 are no whole blocks of 16"),
        ({"transfer_tokens": (16,)}, "calibrate.transfer_tokens: are less than two"),
    ],
)
def test_a_setting_that_cannot_be_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CalibrateConfig(**given)  # type: ignore[arg-type]
