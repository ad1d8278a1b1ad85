"""`twinpool plan` prints a plan without loading what would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints_toy import make_checkpoint
from tests.lab.memory.configs import CONFIGS, LLAMA_31_8B
from twinpool.cli import main


@pytest.fixture
def llama_8b(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_31_8B))
    return str(path)


def test_a_plan_is_told_as_json(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["plan", "--model", llama_8b, "--device", "cuda", "--memory", "80GB", "--decode", "3", "--json"]
    )

    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["fits"] and told["is_served"]
    assert [(worker["role"], worker["peers"]) for worker in told["workers"]] == [
        ("prefill", 3),
        ("decode", 1),
    ]
    (weights, *others) = told["workers"][0]["terms"]
    assert weights["bytes"] == 16_060_522_496
    assert (weights["text"], weights["kind"]) == ("15.0 GiB", "exact")
    assert weights["bytes"] + sum(term["bytes"] for term in others) == told["workers"][0]["total_bytes"]


def test_what_does_not_fit_is_said_with_what_to_cut(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", "cuda", "--memory", "24GiB", "--colocated", "1", "--load", "32x8192")

    code = main(["plan", "--model", llama_8b, *options])

    out = capsys.readouterr().out
    assert code == 1
    assert "does not fit: " in out and "are missing on each rank" in out
    assert "  KV cache: " in out and "conversations instead of 32" in out


def test_a_model_that_is_not_served_is_planned_and_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deepseek.json"
    path.write_text(json.dumps({**CONFIGS["DeepSeek-V2"], "model_type": "deepseek_v2"}))

    main(["plan", "--model", str(path), "--device", "cuda", "--memory", "640GB", "--context", "4096"])

    out = capsys.readouterr().out
    assert "this engine does not run deepseek_v2: the plan is of one that does" in out
    assert "270 MiB" in out  # 4096 x 60 layers x 576 elements x 2 bytes


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--load", "32"], "--load: '32' is not NxTOKENS, as in 32x8192"),
        (["--memory", "lots"], "--memory: 'lots' is no size"),
        (["--parameters", "many"], "--parameters: 'many' is no number such as 7B or 135M"),
        (["--parameters", "9" * 400], "--parameters: '9"),
        (["--context", "9" * 400], "--context: '9"),
        (["--context", "4096,"], "--context: '4096,' is no list of numbers above 0"),
        (["--cache-format", "fp3"], "--cache-format: 'fp3' is none of"),
        (["--decode-tensor-parallel", "3"], "tensor_parallel: 3 ranks"),
        (["--model", "/nowhere/config.json"], "--model: /nowhere/config.json does not exist"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(
    llama_8b: str, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    assert main(["plan", "--model", llama_8b, *options]) == 2
    assert f"twinpool: error: {problem}" in capsys.readouterr().err


def test_planning_loads_neither_torch_nor_ray_nor_grpc(llama_8b: str) -> None:
    program = (
        "import sys\n"
        "from twinpool.cli import main\n"
        f"main(['plan', '--model', {llama_8b!r}, '--memory', '64GiB'])\n"
        "print('loaded:', [name for name in ('torch', 'ray', 'grpc') if name in sys.modules])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )

    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_a_measurement_is_told_beside_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "llama")
    options = ("--colocated", "1", "--kv-memory", "1MiB", "--memory", "2GiB", "--measure", "--json")

    assert main(["plan", "--model", str(tmp_path), *options]) == 0

    parts = {row["term"]: row for row in json.loads(capsys.readouterr().out)["measured"]["colocated"]}
    assert parts["KV cache"]["measured_bytes"] == parts["KV cache"]["planned_bytes"] == 2**20
    assert parts["weights"]["error"] == 0.0
