"""`twinpool calibrate` of a toy: real steps, real transfers, a real server, and a profile in the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints_toy import make_checkpoint
from twinpool.cli.app import main
from twinpool.cli.calibrate import check_writable
from twinpool.core.errors import ConfigError
from twinpool.engine.config import EngineConfig
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import load_model
from twinpool.lab.calibrate.calibration import calibrate_engine
from twinpool.lab.calibrate.config import CalibrateConfig
from twinpool.lab.calibrate.points import StepPoint
from twinpool.lab.calibrate.steps import StepBench
from twinpool.lab.profile.profile import load_profile

TINY = (
    *("--prompts", "8,16,32", "--cached", "16", "--prompt-batches", "2", "--decode-batches", "1,2"),
    *("--contexts", "16,64", "--transfer-tokens", "16,64", "--transports", "tcp", "--repeats", "2"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy"), "llama")


def calibrate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "twinpool", "calibrate", *args],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_toy_is_calibrated_with_a_server_of_two_workers(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "toy.yaml"

    done = calibrate("--model", str(model), "--kv-memory", "4MiB", "--workers", "2", *TINY, "--out", str(out))

    assert done.returncode == 0, done.stderr
    assert (
        "2 x 16 tokens" in done.stdout and "(check)" in done.stdout and "workers that compute" in done.stdout
    )
    profile = load_profile(str(out))
    assert profile.measured is not None
    assert [row[:3] for row in profile.measured.prefill] == [
        *((1, 8, 0), (1, 16, 0), (1, 32, 0), (1, 16, 16), (2, 16, 0)),
    ]
    assert [row[:2] for row in profile.measured.decode] == [(1, 16), (1, 64), (2, 16), (2, 64)]
    assert list(profile.transfers) == ["tcp"] and profile.slowdown is not None
    assert profile.kv_cache_bytes == 4 * 2**20  # blocks of 16 tokens have 8192 bytes: none is lost
    assert profile.hop_s > 0.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompts", "8,x"), "calibrate.prompts: '8,x' is no list of numbers such as 8,32,128"),
        (("--repeats", "0"), "calibrate.repeats: 0 is less than 1"),
        (("--max-chunk-tokens", "64"), "calibrate.prompts: 512 are more than the 64 of a step"),
        (("--out", "profile.json"), "--out: profile.json does not end with .yaml"),
        (
            ("--transports", "pigeon"),
            "calibrate.transports: pigeon is none of cuda_ipc, grpc, nixl, shm, tcp, torch_dist",
        ),
    ],
)
def test_a_bad_option_is_named(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *args]) == 2

    assert capsys.readouterr().err.endswith(f"twinpool: error: {message}\n")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("folder.yaml", "Is a directory"), ("absent/profile.yaml", "No such file or directory")],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    (tmp_path / "folder.yaml").mkdir()
    out = tmp_path / name

    assert main(["calibrate", "--out", str(out)]) == 2

    assert capsys.readouterr().err == f"twinpool: error: --out: {out} cannot be written: {problem}\n"


def test_trying_a_file_leaves_it_as_it_was(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("name: old\n")

    check_writable(str(old))
    check_writable(str(tmp_path / "new.yaml"))

    assert old.read_text() == "name: old\n"
    assert list(tmp_path.iterdir()) == [old]


def test_steps_that_do_not_fit_the_model_or_its_cache_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"calibrate\.contexts: 1046 tokens with an answer are more than"):
        calibrate_engine(CalibrateConfig(model=str(model), contexts=(16, 1024)))
    with pytest.raises(ConfigError, match=r"calibrate\.kv_memory: holds 1024 tokens, and a step needs"):
        calibrate_engine(CalibrateConfig(model=str(model), kv_memory="512KiB"))


def test_a_step_computes_what_its_point_says_and_leaves_nothing(model: Path) -> None:
    loaded = load_model(model, dtype="float32")
    cache = KVCache(loaded.spec.layout(block_tokens=16), 64, "cpu")
    bench = StepBench(loaded, cache, EngineConfig())
    counters = bench._engine.counters  # what the engine says that it did
    point = StepPoint(prompts=1, tokens=8, cached=32, decodes=3, context=20)

    assert bench.measure(point) > 0.0
    first = dict(counters)
    assert bench.measure(point) > 0.0

    # The prefix and a token are computed once; later on that token alone, to see that the prefix is there.
    assert first["prefilled_tokens"] == 33 + 8
    assert counters["prefilled_tokens"] - first["prefilled_tokens"] == 1 + 8
    assert bench._engine.num_sequences == 0
    assert bench._engine.counts().free + bench._engine.counts().cached == 64
