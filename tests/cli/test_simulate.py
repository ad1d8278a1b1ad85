"""`twinpool simulate`: what it prints, writes and returns, and that it does so the same each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinpool.cli.app import main
from twinpool.lab.metrics.limits import Limits
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.records import read_records

SPEC = "synthetic:prompt=lognormal(512,sigma=0.8),output=uniform(16,64),arrival=poisson(4),count=60,seed=3"
PROFILE = ("--profile", "h100-llama-3.1-8b")


def test_a_run_is_shown_and_written_in_the_form_of_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        [
            "simulate",
            SPEC,
            *PROFILE,
            "--layout",
            "2P1D",
            "--ttft",
            "1s",
            "--tpot",
            "1s",
            "--out",
            str(tmp_path),
        ]
    )

    shown = capsys.readouterr().out
    assert code == 0
    assert "60 of 60 answered" in shown
    assert "goodput: 100.0% within TTFT 1000 ms and TPOT 1000 ms" in shown
    assert [line.split()[0] for line in shown.splitlines() if "B " in line and "%" in line] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]
    records = list(read_records(tmp_path / "requests.jsonl"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    again = Summary(Limits(ttft_s=1.0, tpot_s=1.0)).add_all(records).to_json()
    assert again["goodput"]["requests"] == summary["summary"]["goodput"]["requests"] == 60
    assert again["ttft_s"]["p90"] == pytest.approx(summary["summary"]["ttft_s"]["p90"], abs=2e-6)
    assert sum(worker["kv_bytes_in"] for worker in summary["workers"]) == summary["summary"]["kv_bytes"] > 0
    assert "aiconfigurator" in summary["profiles"]["h100-llama-3.1-8b"]


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["simulate", SPEC, *PROFILE, "--layout", "1P1D1C", "--out", str(tmp_path / name)]) == 0
    for file in ("requests.jsonl", "summary.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_file_says_what_happens_to_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(
        "workload: {kind: synthetic, prompt: 700, output: 40, arrival: constant(5), count: 50}\n"
        "simulation:\n"
        "  pools:\n"
        "  - {role: prefill, workers: 1, profile: h100-llama-3.1-70b-tp8}\n"
        "  - {role: decode, workers: 2, profile: h100-llama-3.1-70b-tp4, engine: {max_sequences: 32}}\n"
        "  losses:\n"
        "  - {at_s: 3, worker: decode-1, back_after_s: 2}\n"
        "  role_changes:\n"
        "  - {at_s: 7, worker: decode-0, role: colocated}\n"
    )
    assert main(["simulate", "--config", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["summary"]["answered"] == 50
    assert set(told["summary"]["paths"]) == {"disaggregated", "colocated"}
    assert told["config"]["losses"] == [{"at_s": 3.0, "worker": "decode-1", "back_after_s": 2.0}]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([SPEC], "--profile: is missing"),
        ([SPEC, "--profile", "b300"], "profile: b300 is no path to a .yaml file and none of"),
        ([SPEC, *PROFILE, "--layout", "2P"], "pools: nobody decodes"),
        ([SPEC, *PROFILE, "--layout", "2X"], "--layout: '2X' is no layout such as 2P1D or 3C"),
        ([SPEC, *PROFILE, "--layout", "99999999P1D"], "pools: 100000000 workers are more than 1,000"),
        ([SPEC, *PROFILE, "--layout", "9" * 5000 + "P1D"], "P1D' is no layout such as 2P1D or 3C"),
        ([SPEC, *PROFILE, "--link", "rope"], "transfer.link: rope is none of"),
        (
            [SPEC, *PROFILE, "--overlap", "some"],
            "simulation.transfer.overlap: is none of layers, steps, none",
        ),
        ([*PROFILE], "workload: is missing"),
        ([SPEC, *PROFILE, "--set", "simulation.hop=1"], "simulation.hop: is none of"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_setting(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *args]) == 2
    assert message in capsys.readouterr().err


def test_what_came_before_a_line_that_cannot_be_read_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"arrival_s": 0.0, "prompt_tokens": 9, "output_tokens": 4}\n'
    trace.write_text(line * 60 + line[:30])

    assert main(["simulate", f"trace:path={trace}", *PROFILE, "--out", str(tmp_path)]) == 1

    assert f"not all of the workload: {trace}:61: is not JSON" in capsys.readouterr().out
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["summary"]["answered"] == 60
    assert told["problem"].startswith(f"{trace}:61: is not JSON")


def test_a_full_disk_costs_the_files_and_not_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requests.jsonl.new").symlink_to("/dev/full")

    assert main(["simulate", SPEC, *PROFILE, "--out", str(tmp_path)]) == 2

    shown = capsys.readouterr()
    assert "answered in" in shown.out
    assert shown.err == f"twinpool: error: --out: {tmp_path} cannot be written: No space left on device\n"


def test_profiles_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--profiles"]) == 0
    shown = capsys.readouterr().out
    assert (
        "a100-opt-13b: 1 x A100 80 GB, SwiftTransformer of 2024, fp16; coefficients of simdistserve" in shown
    )
    assert "link ib_ndr_400g: 50 GB/s for each rank, 0 ms; nominal line rate" in shown
