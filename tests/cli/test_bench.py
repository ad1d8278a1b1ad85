"""`twinpool bench`: what it prints, writes and returns, also when it is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.lab.bench.server import Times, serving
from twinpool.lab.metrics.limits import Limits
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.records import read_records
from twinpool.lab.workload.workload import open_workload

SPEC = "synthetic:prompt=9,output=4,arrival=constant(50),count=30"


def test_a_run_is_shown_and_written(tmp_path: Path) -> None:
    with serving(Times(ttft_s=0.02, gap_s=0.01)) as url:
        done = _bench(
            SPEC, "--url", url, "--ttft", "800ms", "--tpot", "800ms", "--out", str(tmp_path / "out")
        )

    assert done.returncode in (0, 1)  # 1: this machine was too busy for the times to be believed
    assert "30 of 30 answered" in done.stdout
    assert "goodput: 100.0% within TTFT 800 ms and TPOT 800 ms" in done.stdout
    assert ("not valid:" in done.stdout) is (done.returncode == 1)
    records = list(read_records(tmp_path / "out" / "requests.jsonl"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    again = Summary(Limits(ttft_s=0.8, tpot_s=0.8)).add_all(records).to_json()
    assert again["goodput"]["requests"] == summary["summary"]["goodput"]["requests"] == 30
    assert again["ttft_s"]["p90"] == pytest.approx(summary["summary"]["ttft_s"]["p90"], abs=2e-6)


def test_json_goes_to_the_standard_output_alone() -> None:
    with serving() as url:
        done = _bench(SPEC, "--url", url, "--json", "--set", "bench.seed=4", "--speed", "2")

    told = json.loads(done.stdout)
    assert told["summary"]["answered"] == 30
    assert told["config"]["seed"] == 4
    assert told["workload"]["speed"] == 2.0
    assert told["client"]["offered_per_s"] == pytest.approx(100)


def test_a_file_says_what_the_command_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    with serving() as url:
        file.write_text(
            "workload: {kind: synthetic, prompt: 7, output: 2, arrival: at_once, count: 5}\n"
            f"bench: {{url: '{url}', warmup: 0, limits: {{ttft_s: 9}}}}\n"
        )
        done = _bench("--config", str(file), "--json", "--set", "workload.output=3")

    told = json.loads(done.stdout)
    assert told["summary"]["output_tokens"] == 15
    assert told["config"]["warmup"] == 0
    assert told["summary"]["goodput"]["ttft_limit_s"] == 9.0


def test_an_interrupt_ends_the_run_cleanly_and_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(Times(ttft_s=0.01, gap_s=0.05)) as url:
        command = [sys.executable, "-m", "twinpool", "bench", "--url", url, "--out", str(out)]
        spec = "synthetic:prompt=9,output=8,arrival=constant(20),count=100000"
        with subprocess.Popen(
            [*command, spec], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            _until_written(out / "requests.jsonl.new")
            time.sleep(1.0)
            run.send_signal(signal.SIGINT)
            stdout, stderr = run.communicate(timeout=30)

    assert run.returncode == 130
    assert "not valid: it was interrupted" in stdout
    assert "Traceback" not in stderr
    records = list(read_records(out / "requests.jsonl"))
    summary = json.loads((out / "summary.json").read_text())
    assert {record.error for record in records} <= {"", "interrupted"}
    assert summary["client"]["sent"] == len(records) == summary["summary"]["requests"]
    assert summary["summary"]["answered"] > 0


def test_a_run_that_does_not_begin_leaves_an_earlier_one_as_it_was(tmp_path: Path) -> None:
    for name in ("requests.jsonl", "summary.json"):
        (tmp_path / name).write_text("of an earlier run")

    done = _bench(SPEC, "--url", "http://127.0.0.1:1", "--out", str(tmp_path))

    assert done.returncode == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "requests.jsonl": "of an earlier run",
        "summary.json": "of an earlier run",
    }


def test_a_full_disk_costs_the_files_and_not_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("of an earlier run")
    (tmp_path / "requests.jsonl.new").symlink_to("/dev/full")

    with serving() as url:
        done = _bench(
            "synthetic:prompt=9,output=2,arrival=constant(200),count=200",
            "--url",
            url,
            "--out",
            str(tmp_path),
        )

    assert done.returncode == 2
    assert "200 of 200 answered" in done.stdout
    assert done.stderr == f"twinpool: error: --out: {tmp_path} cannot be written: No space left on device\n"
    assert (tmp_path / "requests.jsonl").read_text() == "of an earlier run"


def test_what_came_before_a_line_that_cannot_be_read_is_measured(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"arrival_s": 0.0, "prompt_tokens": 9, "output_tokens": 4}\n'
    trace.write_text(line * 60 + line[:30])

    with serving() as url:
        done = _bench(f"trace:path={trace}", "--url", url, "--out", str(tmp_path / "out"))

    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert done.returncode == 1
    assert "60 of 60 answered" in done.stdout
    assert f"not valid: {trace}:61: is not JSON" in done.stdout
    assert told["summary"]["answered"] == told["client"]["sent"] == 60
    assert not told["valid"]
    assert len(list(read_records(tmp_path / "out" / "requests.jsonl"))) == 60


def test_markup_of_a_stranger_is_shown_as_it_is() -> None:
    says = 'data: {"error": {"code": "[/bold]\\ud800"}}\n\n'
    with serving() as url:
        body = json.dumps({"says": says})
        done = _bench(SPEC, "--url", url, "--set", "bench.warmup=0", "--set", f"bench.body={body}")

    assert "errors: [/bold]\\ud800 30" in done.stdout
    assert not done.stderr


def test_a_workload_can_be_written_without_a_server(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"

    done = _bench("sharegpt:conversations=4,seed=3", "--write-workload", str(file))

    assert done.returncode == 0
    assert list(open_workload(f"trace:path={file}")) == list(open_workload("sharegpt:conversations=4,seed=3"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "workload: is missing, as in synthetic"),
        (["synthetic:count=1,promt=5"], 2, "workload.promt: is none of"),
        ([SPEC, "--ttft", "5"], 2, "--ttft: '5' is no time such as 5ms"),
        ([SPEC, "--set", "bench.timeout=5"], 2, "bench.timeout: is none of"),
        ([SPEC, "--set", "engine.block_tokens=5"], 2, "engine: is none of bench, workload"),
        ([SPEC, "--endpoint", "embeddings"], 2, "bench.endpoint: is none of completions, chat"),
        ([SPEC, "--url", "ftp://x"], 2, "bench.url: 'ftp://x' does not begin with http://HOST:PORT"),
        ([SPEC, "--url", "http://127.0.0.1:1"], 1, "connect"),
    ],
)
def test_a_mistake_is_one_line(arguments: Sequence[str], code: int, message: str) -> None:
    done = _bench(*arguments)

    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twinpool", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _until_written(path: Path) -> None:
    for _ in range(300):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} does not come")
