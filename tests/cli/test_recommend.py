"""`twinpool recommend`: what it prints and returns, and how it blames options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab.recommend.tables import write_profile
from twinpool.cli.app import main

SPEC = "synthetic:prompt=100,output=11,arrival=poisson(10),count=40"
LIMITS = ("--ttft", "100ms", "--tpot", "20ms", "--set", "recommend.precision=0.5")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return write_profile(tmp_path, "toy", prefill=(0.0, 1e-4, 0.0), decode=(0.002, 0.0, 0.001))


def test_every_layout_is_in_the_table_and_the_answer_below_it(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        [
            "recommend",
            SPEC,
            "--profile",
            f"{profile}:cost=2,watts=300",
            "--budget",
            "4",
            *LIMITS,
            "--load",
            "1",
        ]
    )

    shown = capsys.readouterr().out
    assert code == 0
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.split()[:1]}
    assert rows["2C"][1:4] == ["2", "4", "600"] and rows["1P1D"][1:4] == ["2", "4", "600"]
    assert "recommended" in rows["2C"]
    assert "Stay colocated: 2C answers" in shown
    for condition in ("2 times the load", "prompts 2 times as long", "a link 10 times slower"):
        assert f"With {condition}: 2C answers" in shown
    assert "link ib_ndr_400g: 50 GB/s for each rank, 0 ms; nominal line rate, one way" in shown
    assert "simulations" in shown


def test_json_holds_the_question_the_answer_and_every_layout(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["recommend", SPEC, "--profile", profile, "--gpus", "2", *LIMITS, "--no-what-if", "--json"]

    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0

    assert capsys.readouterr().out == first
    told = json.loads(first)
    assert {row["layout"] for row in told["layouts"]} == {"2C", "1P1D"}
    assert told["config"]["limits"] == {"ttft_s": 0.1, "tpot_s": 0.02} and told["config"]["gpus"] == 2
    assert told["workload"]["count"] == 40 and told["what_if"] == []
    assert told["layout"] in told["answer"][0]


def test_limits_that_no_layout_meets_are_said_with_what_a_lone_request_takes(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ("--ttft", "5ms", "--tpot", "20ms")  # a prompt alone takes 10 ms

    code = main(["recommend", SPEC, "--profile", profile, "--gpus", "2", *limits])

    assert code == 1
    shown = capsys.readouterr().out
    assert "No layout meets the limits at any rate: even alone on 2C, a request has p90 TTFT 10 ms" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--profile: is missing"),
        (["--profile", "h100-llama-3.1-8b:price=3"], "--profile: 'price' is none of cost, watts, memory"),
        (["--profile", "h100-llama-3.1-8b"], "recommend.gpus: is missing"),
        (["--profile", "nothing", "--gpus", "2"], "profile: nothing is no path"),
    ],
)
def test_a_wrong_option_is_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", SPEC, *options]) == 2
    assert message in capsys.readouterr().err
