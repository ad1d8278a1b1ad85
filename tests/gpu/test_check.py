"""The check for a GPU runs: rehearsed on a CPU, skipped without a GPU, in earnest where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu import check


def test_without_a_gpu_every_step_is_skipped_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "_MEASUREMENTS", tmp_path)

    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert all(line.endswith("skipped: no GPU") for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_on_a_cpu_every_step_that_needs_no_gpu_is_rehearsed(tmp_path: Path) -> None:
    assert check.main(["--device", "cpu", "--tokens", "64", "--out", str(tmp_path)]) == 0

    (path,) = tmp_path.iterdir()
    steps = json.loads(path.read_text())["steps"]
    skipped = [step["step"] for step in steps if step["result"] == "skipped"]
    assert all("cuda_ipc" in step for step in skipped)
    assert {step["result"] for step in steps} <= {"ok", "skipped"}
    assert all(step["gb_per_s"] > 0 for step in steps if "another process" in step["step"])


@pytest.mark.gpu
def test_on_a_gpu_no_step_fails(tmp_path: Path) -> None:
    assert check.main(["--out", str(tmp_path)]) == 0
