"""Options, file and defaults: who wins, what is refused, and what two ways of serving have in common."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from twinpool.cli import main
from twinpool.cluster.config import DeploymentConfig, PoolConfig, PoolsConfig, WorkerConfig
from twinpool.core.config import bind, parse_yaml
from twinpool.core.errors import ConfigError


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main([*args, "--print-config"]) == 0
    return capsys.readouterr().out


def resolved(capsys: pytest.CaptureFixture[str], *args: str) -> DeploymentConfig:
    return bind(DeploymentConfig, parse_yaml(printed(capsys, "serve", *args), source="printed"))


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_without_options_and_file_the_defaults_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved(capsys) == DeploymentConfig()


def test_an_option_beats_the_file_and_the_file_beats_the_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "twinpool.yaml"
    file.write_text("engine: {block_tokens: 32, max_sequences: 7}\nhttp: {port: 9000}\n")

    config = resolved(capsys, "--config", str(file), "--port", "9001", "--set", "engine.max_sequences=9")

    assert (config.engine.block_tokens, config.engine.max_sequences, config.http.port) == (32, 9, 9001)
    assert config.engine.max_batch_tokens == DeploymentConfig().engine.max_batch_tokens


def test_what_is_printed_can_stand_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = printed(capsys, "serve", "--prefill", "3", "--kv-memory", "2GiB", "--policy", "round_robin")
    file = tmp_path / "printed.yaml"
    file.write_text(text)

    assert printed(capsys, "serve", "--config", str(file)) == text


def test_each_pool_has_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prefill-tensor-parallel", "2", "--decode-tensor-parallel", "4")

    pools = resolved(capsys, *options, "--set", "pools.decode.block_tokens=32").pools

    assert (pools.prefill.tensor_parallel, pools.decode.tensor_parallel) == (2, 4)
    assert (pools.prefill.workers, pools.decode.workers, pools.decode.block_tokens) == (1, 1, 32)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_colocated_and_disaggregated_differ_in_the_number_of_workers_alone(
    capsys: pytest.CaptureFixture[str], num_workers: int
) -> None:
    split = printed(capsys, "serve", "--prefill", str(num_workers), "--decode", "2")
    together = printed(capsys, "serve", "--colocated", str(num_workers + 2))

    changed = {
        line[1:].strip()
        for line in difflib.ndiff(split.splitlines(), together.splitlines())
        if line[0] in "+-"
    }
    assert changed == {f"workers: {n}" for n in {0, 2, num_workers, num_workers + 2}}


@pytest.mark.parametrize(
    ("in_file", "options", "expected"),
    [
        ("", ["--colocated", "2"], (0, 0, 2)),
        ("", ["--prefill", "2"], (2, 1, 0)),
        ("", ["--decode", "3"], (1, 3, 0)),
        ("pools: {colocated: {workers: 3}}", [], (0, 0, 3)),
        ("pools: {colocated: {workers: 3}}", ["--prefill", "2"], (2, 1, 0)),
        ("pools: {prefill: {workers: 3}}", ["--colocated", "1"], (0, 0, 1)),
        ("pools: {prefill: {workers: 3}}", ["--decode", "2"], (3, 2, 0)),
        ("pools: {prefill: {num_cpus: 3}}", [], (1, 1, 0)),
    ],
)
def test_naming_one_kind_of_pool_means_none_of_the_other(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    in_file: str,
    options: list[str],
    expected: tuple[int, int, int],
) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(in_file)

    pools = resolved(capsys, "--config", str(file), *options).pools

    assert (pools.prefill.workers, pools.decode.workers, pools.colocated.workers) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--set", "engine.block_token=8"], "engine.block_token: is none of block_tokens, "),
        (["serve", "--set", "engine.block_token=8"], "did you mean block_tokens?"),
        (
            ["serve", "--set", "engine.block_tokens=x"],
            "engine.block_tokens: 'x' is a text, not",
        ),
        (["serve", "--set", "engine"], "--set: 'engine' is not PATH=VALUE"),
        (["serve", "--config", "/none.yaml"], "/none.yaml: cannot be read"),
        (
            ["serve", "--colocated", "1", "--prefill", "1"],
            "pools: 1 colocated workers beside 1 prefill",
        ),
        (["serve", "--kv-memory", "banana"], "kv_memory: 'banana' is no size such as 512MiB"),
        (["serve", "--prefill", "0"], "pools: 0 prefill, 1 decode and no colocated workers cannot answer"),
        (["serve", "--port", "70000"], "http.port: 70000 is not in [0, 65535]"),
        (["serve", "--placement", "pack"], "placement: is none of PACK, SPREAD"),
        (["serve", "--device", "tpu"], "device: tpu is none of cpu, cuda, cuda:N"),
        (["serve", "--set", "router.model=x"], "router.model: is none of"),
        (["worker", "--join", "127.0.0.1:1"], "--role: is missing"),
        (["worker", "--role", "decode"], "--join: is missing"),
        (["worker", "--role", "decode", "--join", "127.0.0.1"], "--join: '127.0.0.1' is not HOST:PORT"),
        (
            ["worker", "--role", "decode", "--join", "x:1", "--host", "0.0.0.0"],
            "--host: 0.0.0.0 is no address",
        ),
        (["worker", "--role", "decoder", "--join", "x:1"], "role: is none of prefill, decode, colocated"),
    ],
)
def test_what_cannot_work_is_one_line_with_its_field(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    error = refusal(capsys, *args)

    assert error.startswith("twinpool: error: ")
    assert message in error


def test_a_log_level_that_does_not_exist_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINPOOL_LOG", "loud")

    error = refusal(capsys, "serve")

    assert error == "twinpool: error: TWINPOOL_LOG: loud is none of DEBUG, INFO, WARNING, ERROR\n"


def test_an_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--prefil", "2"])

    assert (
        capsys.readouterr().err
        == "twinpool: error: unrecognized arguments: --prefil 2; twinpool --help tells more\n"
    )


def test_the_api_key_may_come_from_the_environment_and_is_not_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINPOOL_API_KEY", "geheim")

    text = printed(capsys, "serve")

    assert "api_key: null" in text
    assert "geheim" not in text


def test_two_workers_started_by_hand_have_ids_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "worker", "--role", "decode", "--join", "h:1", "--block-tokens", "8")

    config = bind(WorkerConfig, parse_yaml(text, source="printed"))

    assert config.worker_id.startswith("decode-")
    assert (config.join, config.engine.block_tokens, config.orphan_s) == ("h:1", 8, None)


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [
        ("cpu", None, {"CPU": 1.0}),
        ("cuda", None, {"CPU": 1.0, "GPU": 1.0}),
        ("cuda", 0.5, {"CPU": 1.0, "GPU": 0.5}),
        ("cuda", 0.0, {"CPU": 1.0}),
    ],
)
def test_a_worker_on_cuda_needs_a_gpu_unless_told_otherwise(
    device: str, num_gpus: float | None, expected: dict[str, float]
) -> None:
    pools = PoolsConfig(decode=PoolConfig(workers=1, num_gpus=num_gpus))
    config = DeploymentConfig(device=device, pools=pools)

    assert (
        config.resources(WorkerConfig(worker_id="d", role="decode", generation=1, join="").role) == expected
    )  # type: ignore[arg-type]


def test_pools_with_a_negative_number_are_refused() -> None:
    with pytest.raises(ConfigError, match="-1 workers are less than 0"):
        PoolConfig(workers=-1)
