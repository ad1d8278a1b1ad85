"""Every example runs as its docstring says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints_toy import make_checkpoint
from tests.cluster.servers import Server, serving, terminate
from twinpool.cluster.api_client import ApiClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy"), "llama")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model, "--set", "http.api_key=secret") as running:
        yield running
        assert terminate(running) == 0


def run(
    name: str, *args: str, url: str = "", key: str = "secret", timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | {"TWINPOOL_URL": url, "TWINPOOL_API_KEY": key},
    )


def test_chat_stream_prints_an_answer_and_its_length(server: Server) -> None:
    done = run("chat_stream.py", "hello", url=server.client.url)

    assert done.returncode == 0, done.stderr
    match = re.search(r"\[(\d+) tokens\]\n$", done.stdout)
    assert match is not None and 1 <= int(match[1]) <= 64
    assert len(done.stdout) > len(match[0])


def test_chat_stream_says_that_it_has_no_answer_when_the_key_is_wrong(server: Server) -> None:
    done = run("chat_stream.py", "hello", url=server.client.url, key="wrong")

    assert done.returncode == 1
    assert "no complete answer" in done.stderr and "a valid API key is needed" in done.stderr


def test_load_test_prints_each_request_and_what_they_come_to(server: Server) -> None:
    done = run("load_test.py", url=server.client.url)

    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^request \d+: TTFT 0?\.?\d.* 8 tokens $", done.stdout, re.M)) == 30
    assert "30 answered, " in done.stdout


def test_timeline_prints_every_step_of_a_disaggregated_request(server: Server) -> None:
    done = run("timeline.py", "hello", url=server.client.url)

    assert done.returncode == 0, done.stderr
    assert "path disaggregated, prefill prefill-0, decode decode-0\n" in done.stdout
    steps = re.findall(r"^ *[\d.]+ ms .* (\w+)$", done.stdout, flags=re.MULTILINE)
    assert set(steps) >= {"queue", "reserve", "prefill", "transfer", "first_token", "decode"}
    # hello is five byte tokens: 2 layers x key and value x 2 heads x 16 elements x 4 bytes each
    assert "KV moved: 2560 bytes" in done.stdout


def test_in_process_moves_kv_and_answers_as_a_server_does(model: Path, server: Server) -> None:
    done = run("in_process.py", str(model), "hello")

    assert done.returncode == 0, done.stderr
    assert "path disaggregated, KV moved: 2560 bytes, outcome: " in done.stdout
    body = {"prompt": "hello", "max_tokens": 24, "temperature": 0}
    client = ApiClient(server.client.url, api_key="secret")
    text = client.post("/v1/completions", body)["choices"][0]["text"]
    assert done.stdout.startswith(text + "\n")


def test_memory_plan_prints_what_a_model_needs(model: Path) -> None:
    done = run("memory_plan.py", str(model / "config.json"), "1GiB")

    assert done.returncode == 0, done.stderr
    # 2 layers x key and value x 2 heads x 16 elements x 2 bytes each
    assert f"conversations of 1024 tokens fit, {1024 * 256:,} bytes each" in done.stdout
    assert "of 1,073,741,824 bytes" in done.stdout


def test_calibrate_engine_measures_steps_and_predicts_one(model: Path) -> None:
    done = run("calibrate_engine.py", str(model))

    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^(\S.*?) +[\d.]+ ms, (fitted|predicted) within [\d.]+%$", done.stdout, re.MULTILINE)
    assert ("1 x 32 tokens after 32", "fitted") in steps and ("2 decodes at 80", "predicted") in steps
    assert re.search(r"^so a step of 2 decodes at 64 takes [\d.]+ ms$", done.stdout, re.MULTILINE)


def test_simulate_ratio_finds_the_layout_that_answers_most_in_time() -> None:
    done = run("simulate_ratio.py", "h100-llama-3.1-8b", "24")

    assert done.returncode == 0, done.stderr
    shares = dict(re.findall(r"^(\w+) +([\d.]+)%", done.stdout, re.MULTILINE))
    assert set(shares) == {"4C", "1P3D", "2P2D", "3P1D"}
    assert max(shares, key=lambda layout: float(shares[layout])) == "2P2D"


def test_recommend_layout_prints_each_layout_and_says_what_to_do() -> None:
    done = run("recommend_layout.py", "h100-llama-3.1-8b", "2", "1000")

    assert done.returncode == 0, done.stderr
    rates = dict(re.findall(r"^(\w+) +([\d.]+) requests/s$", done.stdout, re.MULTILINE))
    assert set(rates) == {"2C", "1P1D"}
    best = max(rates, key=lambda layout: float(rates[layout]))
    assert re.search(rf"^(Stay colocated: 2C|Split: {best}) answers ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_ratio_study_compares_and_gives_the_workers_their_roles_back(server: Server, tmp_path: Path) -> None:
    done = run("ratio_study.py", str(tmp_path), "0.5", "16", url=server.client.url, timeout_s=240.0)

    assert done.returncode == 0, done.stderr
    cells = {path.name for path in (tmp_path / "cells").iterdir()}
    assert cells == {f"{arm}_at_16_r{repeat}.json" for arm in ("1-1", "colocated") for repeat in range(3)}
    assert "colocated" in done.stdout and "at 16 req/s" in done.stdout.replace("At", "at")
    workers = ApiClient(server.client.url, api_key="secret").get("/admin/workers")
    assert {worker["id"]: worker["role"] for worker in workers} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }
