"""`twinpool compare`, for real: killed in the middle it goes on where it was, and its report is whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.checkpoints_toy import make_checkpoint
from tests.cluster.servers import serving, terminate

PATIENCE_S = 120.0
OPTIONS = (
    *("--rates", "4", "--cell", "2", "--repeats", "2", "--ttft", "30s", "--tpot", "10s"),
    *("--workload", "synthetic:prompt=24,output=6", "--late-limit", "60s"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy"), "llama")


@contextmanager
def comparing(out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run `twinpool compare` until the block ends; it is killed then if it still lives."""
    command = [sys.executable, "-m", "twinpool", "compare", "--out", str(out), *OPTIONS, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until_measured(out: Path, cells: int, process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while len(list((out / "cells").glob("*.json"))) < cells:
        assert process.poll() is None and time.monotonic() < end_s, process.communicate(timeout=10)[0]
        time.sleep(0.05)


def finish(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, text
    return text


def until_gone(processes: list[psutil.Process]) -> None:
    """Wait for the server to notice that its command was killed, and to end with all that it started."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert not alive, [process.name() for process in alive]


@pytest.mark.slow
def test_a_killed_study_leaves_no_process_and_goes_on_with_its_cells(model: Path, tmp_path: Path) -> None:
    server = ("--model", str(model), "--kv-memory", "4MiB", "--threads", "1")
    with comparing(tmp_path, *server) as process:
        until_measured(tmp_path, 1, process)
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        until_gone(started)
    first = {path.name: path.read_bytes() for path in (tmp_path / "cells").glob("*.json")}
    assert 1 <= len(first) < 4

    with comparing(tmp_path, *server) as process:
        text = finish(process)

    cells = {path.name: path.read_bytes() for path in (tmp_path / "cells").glob("*.json")}
    assert set(cells) == {f"{arm}_at_4_r{repeat}.json" for arm in ("1-1", "colocated") for repeat in range(2)}
    assert all(cells[name] == data for name, data in first.items()), "a finished cell was measured again"
    assert str(tmp_path / "report.html") in text
    assert "<svg" in (tmp_path / "report.html").read_text()
    paths = {
        measurement["cell"]["arm"]: measurement["bench"]["summary"]["paths"]
        for measurement in json.loads((tmp_path / "study.json").read_text())["cells"]
    }
    assert paths == {"1:1": {"disaggregated": 8}, "colocated": {"colocated": 8}}


def test_a_running_server_is_studied_and_keeps_its_roles_and_ctrl_c_keeps_what_was_measured(
    model: Path, tmp_path: Path
) -> None:
    with serving(model, "--prefill", "1", "--decode", "1") as running:
        url = ("--url", running.client.url)
        pids = {worker["pid"] for worker in running.client.get("/admin/workers")}
        assert {psutil.Process(pid).nice() for pid in pids} == {psutil.Process(running.process.pid).nice()}
        with comparing(tmp_path, *url) as process:
            until_measured(tmp_path, 1, process)
            os.kill(process.pid, signal.SIGINT)
            text, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, text
        assert "the same command goes on from the" in text
        assert (tmp_path / "report.html").exists()
        assert roles(running.client.get("/admin/workers")) == {"prefill-0": "prefill", "decode-0": "decode"}

        with comparing(tmp_path, *url) as process:
            finish(process)

        assert len(list((tmp_path / "cells").glob("*.json"))) == 4
        assert roles(running.client.get("/admin/workers")) == {"prefill-0": "prefill", "decode-0": "decode"}
        assert running.client.get("/admin/audit")["ok"] is True
        measured = json.loads((tmp_path / "cells" / "1-1_at_4_r0.json").read_text())
        assert measured["transfers"]["transfers"] == 8
        # 24 tokens: 2 layers x key and value x 2 heads x 16 elements x 4 bytes each
        assert measured["transfers"]["kv_bytes"] == 8 * 24 * 2 * 2 * 2 * 16 * 4
        assert measured["pools"]["prefill"]["prompt_tokens"] == 8 * 24
        assert measured["pools"]["decode"]["output_tokens"] == 8 * 5
        assert terminate(running) == 0


def roles(workers: list[dict[str, str]]) -> dict[str, str]:
    return {worker["id"]: worker["role"] for worker in workers}
