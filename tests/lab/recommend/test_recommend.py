"""Where the best layout is known it is found, as by brute force, and nothing is won for free.

The profiles are formulas: of the tokens of a prompt, and of the sequences that decode in a step.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.lab.profile.bounds import colocated_rate, disaggregated_rate
from tests.lab.recommend.tables import brute_force, write_profile
from twinpool.core.errors import ConfigError
from twinpool.lab.metrics.limits import Limits
from twinpool.lab.recommend.config import RecommendConfig, WorkerKind
from twinpool.lab.recommend.recommend import recommend_layout
from twinpool.lab.recommend.verdict import Reason
from twinpool.lab.simulate.config import Transfer
from twinpool.lab.workload.workload import open_workload

# Profile, workload, limits, other settings, and the best layouts.
Case: TypeAlias = tuple[dict[str, Any], str, Limits, dict[str, Any], set[str]]
ALL_OF_FOUR = ("4C", "1P3D", "2P2D", "3P1D", "1P1D2C", "1P2D1C", "2P1D1C")
PREFILL_BOUND: dict[str, Any] = {"prefill": (0.0, 1e-4, 0.0), "decode": (0.002, 0.0, 0.0)}
LONG_PROMPTS = "synthetic:prompt=1000,output=11,arrival=poisson(10),count=120"


def question(profile: str, limits: Limits, **more: Any) -> RecommendConfig:
    settings: dict[str, Any] = {"gpus": 4, "precision": 0.2, "has_what_if": False, **more}
    return RecommendConfig(kinds=(WorkerKind(profile=profile),), limits=limits, **settings)


# A prompt of 0.1 s between the tokens of an answer of 10 gaps adds 10 ms to each, so colocated workers must
# hardly ever meet two requests; three prefill workers compute 30 prompts a second, enough for one to decode.
PREFILL: Case = (PREFILL_BOUND, LONG_PROMPTS, Limits(ttft_s=1.0, tpot_s=0.008), {}, {"3P1D"})
# A step of n takes 10 + n ms: 10 sequences at once stay below 20 ms, 5 requests/s on each decode worker.
# Who computes prompts between such steps has a first token after 1.5 steps on average, which is too late.
DECODE: Case = (
    {"prefill": (0.0, 5e-5, 0.0), "decode": (0.010, 0.0, 0.001)},
    "synthetic:prompt=100,output=101,arrival=poisson(10),count=120",
    Limits(ttft_s=0.020, tpot_s=0.020),
    {},
    {"1P3D"},
)
# As the first, but KV of a prompt, 256 kB, takes 2.56 s: its second token comes too late wherever it is sent.
SLOW_LINK: Case = (
    PREFILL_BOUND,
    LONG_PROMPTS,
    Limits(ttft_s=1.0, tpot_s=0.008),
    {"transfer": Transfer(bytes_s=1e5)},
    {"4C"},
)
# Prompts of 10 ms on average.  If all are alike, one prefill worker has 100 a second with little of a queue,
# and three decode workers, 8 sequences of 0.2 s each, 120.  If one in twenty takes 162 ms, the mean square of
# the time is 13 times as much, and so is the wait for one prefill worker; with four to go to none need wait.
MIXED_WORK: dict[str, Any] = {"prefill": (0.0, 1e-4, 0.0), "decode": (0.001, 0.0, 0.0005)}
EQUAL: Case = (
    MIXED_WORK,
    "synthetic:prompt=100,output=41,arrival=poisson(50),count=200",
    Limits(ttft_s=0.5, tpot_s=0.005),
    {},
    {"1P3D"},
)
BIMODAL: Case = (
    MIXED_WORK,
    "synthetic:prompt=bimodal(20,1620,long_share=0.05),output=41,arrival=poisson(50),count=200",
    Limits(ttft_s=0.5, tpot_s=0.005),
    {},
    {"4C"},
)
TABLES = {
    "prefill-bound": PREFILL,
    "decode-bound": DECODE,
    "slow link": SLOW_LINK,
    "equal lengths": EQUAL,
    "bimodal lengths": BIMODAL,
}


_LONG = ("equal lengths", "bimodal lengths")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _LONG else []) for name in TABLES]
)
def test_the_best_of_all_layouts_and_rates_is_found_and_is_the_one_known(name: str, tmp_path: Path) -> None:
    table, spec, limits, more, known = TABLES[name]
    config = question(write_profile(tmp_path, "toy", **table), limits, **more)
    workload = open_workload(spec)

    found = recommend_layout(workload, config)

    brute = brute_force(workload, config, ALL_OF_FOUR, first=0, last=35)  # 1 to 590 requests per second
    assert found.layout.name in known
    assert brute[found.layout.name] == pytest.approx(max(brute.values()))
    for entry in (*found.ranking.finalists, *found.ranking.others):
        if entry.is_below:
            assert brute[entry.layout.name] < entry.mean
        else:
            assert entry.values[0] == pytest.approx(brute[entry.layout.name])


def test_a_load_that_colocated_workers_answer_is_no_reason_to_split(tmp_path: Path) -> None:
    table, spec, limits, _, _ = PREFILL
    config = question(write_profile(tmp_path, "toy", **table), limits, load_rate=2.0, has_mixed=False)

    found = recommend_layout(open_workload(spec), config)

    assert found.layout.name == "4C" and found.verdict.reason is Reason.COLOCATED_SUFFICES
    assert found.ranking.best.layout.name == "3P1D"  # it would answer more, if more came


def test_a_load_far_below_what_is_answered_is_told_with_its_distance(tmp_path: Path) -> None:
    table, spec, limits, _, _ = PREFILL
    config = question(write_profile(tmp_path, "toy", **table), limits, load_rate=2.0, has_mixed=False)

    found = recommend_layout(open_workload(spec), config)

    times = found.verdict.chosen.mean / 2.0
    assert times > 2.0
    assert found.to_json()["answer"][0].endswith(
        f"That is {times:.2g} times the load of 2 requests/s: fewer GPUs may do."
    )


def test_a_load_that_nobody_answers_is_said_to_be_too_much(tmp_path: Path) -> None:
    """36 prompts of 40 take two workers 180 ms, and 1000 a second come in 36 ms: some wait 144 ms."""
    profile = write_profile(tmp_path, "toy", prefill=(0.0, 1e-4, 0.0), decode=(0.0, 0.0, 1e-4))
    workload = open_workload("synthetic:prompt=100,output=101,arrival=poisson(50),count=40")

    found = recommend_layout(workload, question(profile, Limits(ttft_s=0.1), gpus=2, load_rate=1000.0))

    first = found.to_json()["answer"][0]
    assert first.endswith("It does not answer the load of 1000 requests/s in 3 of 3 repeats.")


LINK_DOUBT = "Transfers over ib_ndr_400g have no latency (nominal line rate, one way, no latency)"
HOP_DOUBT = "The router reaches workers in no time (recommend.hop_s)"


@pytest.mark.parametrize(
    ("more", "doubted"),
    [
        ({}, [LINK_DOUBT, HOP_DOUBT]),
        ({"transfer": Transfer(link="mooncake_8x200g")}, [HOP_DOUBT]),
        ({"hop_s": 0.001}, [LINK_DOUBT]),
        ({"transfer": Transfer(latency_s=1e-5), "hop_s": 0.001}, []),
    ],
)
def test_what_costs_pools_and_is_taken_for_nothing_is_doubted(
    more: dict[str, Any], doubted: list[str], tmp_path: Path
) -> None:
    config = question(write_profile(tmp_path, "toy", **PREFILL_BOUND), Limits(), gpus=2, **more)

    found = recommend_layout(open_workload("synthetic:prompt=100,output=2,count=20"), config)

    assert [doubt.partition(":")[0] for doubt in found.doubts] == doubted


def test_hops_between_router_and_workers_cost_pools_more(tmp_path: Path) -> None:
    """A prompt takes 0.1 s; with a hop of 60 ms its first token comes after two on 1C, after four on 1P1D."""
    profile = write_profile(tmp_path, "toy", prefill=(0.1, 0.0, 0.0), decode=(0.001, 0.0, 0.0))
    limits = Limits(ttft_s=0.3)
    workload = open_workload("synthetic:prompt=100,output=2,arrival=poisson(1),count=20")

    found = recommend_layout(workload, question(profile, limits, gpus=2, repeats=1, hop_s=0.06))

    values = {entry.layout.name: entry.mean for entry in found.ranking.finalists}
    assert values["2C"] > 1.0 and values["1P1D"] == 0.0


def test_a_link_that_nobody_knows_is_refused_before_anything_is_simulated(tmp_path: Path) -> None:
    config = question(
        write_profile(tmp_path, "toy", **PREFILL_BOUND), Limits(), transfer=Transfer(link="here")
    )
    trials: list[object] = []

    with pytest.raises(ConfigError, match=r"transfer\.link: here is none of"):
        recommend_layout(open_workload(LONG_PROMPTS), config, on_trial=trials.append)

    assert not trials


def test_a_link_that_only_a_profile_knows_is_made_slower_too(tmp_path: Path) -> None:
    table, spec, limits, _, _ = PREFILL
    measured = {"transfers": {"here": {"latency_s": 0.0, "bytes_s": 1e7}}}
    config = question(
        write_profile(tmp_path, "toy", **table, **measured),
        limits,
        transfer=Transfer(link="here"),
        has_mixed=False,
        has_what_if=True,
    )

    found = recommend_layout(open_workload(spec), config)

    # The KV of a prompt, 256 kB, takes 26 ms, which over ten gaps of an answer are less than 8 ms each; ten
    # times slower it takes 0.26 s.
    slow = found.what_ifs[-1]
    assert found.layout.name == "3P1D"
    assert slow.name == "a link 10 times slower" and slow.verdict is not None
    assert slow.verdict.chosen.layout.name == "4C"


@pytest.mark.parametrize(("prompt", "output"), [(100, 100), (300, 100), (100, 300)])
@pytest.mark.parametrize("gpus", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_gpus_without_limits_and_interference_never_answer_more_in_two_pools(
    prompt: int, output: int, gpus: int, tmp_path: Path
) -> None:
    token_s = 1e-4  # of any token, prompt or answer, alone or in company
    profile = write_profile(tmp_path, "toy", prefill=(0.0, token_s, 0.0), decode=(0.0, 0.0, token_s))
    lengths = f"prompt=uniform({prompt // 2},{prompt}),output=uniform({output // 2},{output})"
    workload = open_workload(f"synthetic:{lengths},count=40")

    found = recommend_layout(workload, question(profile, Limits(), gpus=gpus, precision=0.05))

    assert found.stays_colocated
    colocated = found.ranking.colocated
    assert colocated is not None
    for entry in (*found.ranking.finalists, *found.ranking.others):
        assert entry.values[0] <= colocated.values[0] * 1.05, entry.layout.name


def test_raw_throughput_is_that_of_the_closed_forms(tmp_path: Path) -> None:
    """A prompt takes 10 ms and an answer too, so 2C and 1P1D both answer 100 a second, if enough come.

    Of 21 requests alone one is left over on 2C, and on 1P1D nobody decodes during the first prompt.
    """
    profile = write_profile(tmp_path, "toy", prefill=(0.0, 1e-4, 0.0), decode=(0.0, 0.0, 1e-4))
    workload = open_workload("synthetic:prompt=100,output=101,count=21")

    found = recommend_layout(workload, question(profile, Limits(), gpus=2, repeats=1, precision=0.02))

    by_name = {entry.layout.name: entry.mean for entry in found.ranking.finalists}
    work_s = {"prefill_s": 100 * 1e-4, "decode_s": 100 * 1e-4}
    assert by_name["2C"] == pytest.approx(colocated_rate(workers=2, **work_s), rel=0.02)
    split = disaggregated_rate(prefill_workers=1, decode_workers=1, **work_s)
    assert by_name["1P1D"] == pytest.approx(split, rel=0.02)


def test_equal_questions_have_equal_answers_and_each_simulation_is_told(tmp_path: Path) -> None:
    table, spec, limits, _, _ = PREFILL
    config = question(
        write_profile(tmp_path, "toy", **table), limits, gpus=2, has_what_if=True, precision=0.3
    )
    numbers: list[int] = []

    found = recommend_layout(open_workload(spec), config, on_trial=lambda trial: numbers.append(trial.number))
    again = recommend_layout(open_workload(spec), config)

    assert json.dumps(found.to_json(), allow_nan=False) == json.dumps(again.to_json(), allow_nan=False)
    assert numbers == list(range(1, found.num_simulations + 1))
    assert [what_if.name for what_if in found.what_ifs] == [
        "2 times the load",
        "prompts 2 times as long",
        "a link 10 times slower",
    ]


def test_a_layout_whose_cache_holds_too_few_tokens_is_left_out_and_said_why(tmp_path: Path) -> None:
    small = write_profile(tmp_path, "small-toy", cache_tokens=512, **PREFILL_BOUND)
    large = write_profile(tmp_path, "large-toy", cache_tokens=4096, **PREFILL_BOUND)
    config = RecommendConfig(
        kinds=(WorkerKind(profile=small), WorkerKind(profile=large)),
        gpus=2,
        limits=Limits(ttft_s=1.0, tpot_s=0.008),
        precision=0.3,
        has_what_if=False,
    )

    found = recommend_layout(open_workload(LONG_PROMPTS), config)

    tried = {entry.layout.name for entry in (*found.ranking.finalists, *found.ranking.others)}
    assert tried == {"2C(large)", "1P(large)+1D(large)"}
    why = {misfit.layout.name: misfit.why for misfit in found.misfits}
    assert why["1P(large)+1D(small)"] == (
        "the KV cache of a decode worker holds 512 tokens, and 100% of the requests are longer"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 0}, "recommend.gpus: is missing"),
        ({"limits": Limits(tpot_s=0.1)}, "recommend.limits.ttft_s: is missing"),
        ({"percentile": 0.0}, "recommend.percentile: 0.0 is not in"),
        ({"max_layouts": 3}, "recommend.max_layouts: more than 3 are possible"),
        ({"gpus": 10**6}, "recommend: more than 1,000 workers can be had, too many to simulate"),
        ({"budget": 5.0}, r"kinds.cost: is missing for .*toy\.yaml: recommend.budget is given"),
        ({"watts": 700.0}, r"kinds.watts: is missing for .*toy\.yaml: recommend.watts is given"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    limits = Limits(ttft_s=1.0, tpot_s=0.008)
    config = question(write_profile(tmp_path, "toy", **PREFILL_BOUND), limits)

    with pytest.raises(ConfigError, match=message):
        recommend_layout(open_workload(LONG_PROMPTS), replace(config, **change))
