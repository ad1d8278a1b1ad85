"""Workers that are started by hand: they join, serve, drain and are refused like any others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoints_toy import make_checkpoint
from tests.cluster.servers import PATIENCE_S, Server, free_port
from tests.patience import until
from twinpool.cluster.api_client import ApiClient


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy"), "llama")


@contextmanager
def program(*args: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `twinpool` with ``args`` until the block ends."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "twinpool", *args],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def twinpool(*args: str, stdin: str = "") -> str:
    """Run a command to its good end and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "twinpool", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    return done.stdout


def test_workers_started_by_hand_serve_drain_and_are_refused(model: Path, tmp_path: Path) -> None:
    join, url = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    common = ["--model", str(model), "--kv-memory", "4MiB", "--threads", "1"]
    server_args = ["serve", "--without-ray", "--join-port", join.rpartition(":")[2]]
    with (
        program(
            *server_args, "--port", url.rpartition(":")[2], "--model", str(model), log=tmp_path / "s"
        ) as process,
        program("worker", "--role", "prefill", "--join", join, *common, log=tmp_path / "p") as prefill,
        program(
            "worker", "--role", "decode", "--join", join, *common, "--block-tokens", "8", log=tmp_path / "d"
        ),
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready {url}\n", (tmp_path / "s").read_text()
        server = Server(process, ApiClient(url), tmp_path, tmp_path / "s")
        expected = server.answer()

        text = server.client.post("/v1/completions", {"prompt": "hello", "max_tokens": 8, "temperature": 0})[
            "choices"
        ][0]["text"]
        options = ["--url", url, "--max-tokens", "8", "--temperature", "0"]
        assert twinpool("complete", "hello", *options) == text + "\n"
        assert twinpool("complete", *options, stdin="hello") == text + "\n"
        assert len(twinpool("chat", *options, stdin="hi\n\nhow are you?\n").splitlines()) >= 2
        assert "the books add up" in twinpool("status", "--url", url)

        refused = ["worker", "--role", "decode", "--join", join, *common, "--dtype", "bfloat16"]
        with program(*refused, log=tmp_path / "r") as misfit:
            assert misfit.wait(PATIENCE_S) == 1
        assert "dtype: " in (tmp_path / "r").read_text().splitlines()[-1]

        prefill.send_signal(signal.SIGTERM)
        assert prefill.wait(PATIENCE_S) == 0
        assert until(lambda: len(server.client.get("/admin/workers")) == 1, within_s=PATIENCE_S)
        assert server.answer() == expected

        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
