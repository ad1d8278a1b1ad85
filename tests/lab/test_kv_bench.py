"""`twinpool kv-bench` moves KV between two processes, and tells the truth about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from twinpool.cli import main
from twinpool.core.layout import KVLayout
from twinpool.lab.kv_bench import ranks
from twinpool.lab.kv_bench.probe import Probe
from twinpool.lab.kv_bench.source import made_up

PATIENCE_S = 120.0  # two processes load torch first
QUICK = ("--tokens", "40", "--repeat", "2")
NUMBERS = (
    "gb_s",
    "bare_gb_s",
    "ratio",
    "first_block_s",
    "last_block_s",
    "cpu_s_per_gb",
    "bare_cpu_s_per_gb",
    "bare_piece_bytes",
    "num_frames",
)


@contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[str]]:
    """Run `twinpool kv-bench`; it is killed with its children if it has not ended by itself."""
    running = subprocess.Popen(
        [sys.executable, "-m", "twinpool", "kv-bench", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell without job control lets its background jobs ignore it; nothing here takes a lock.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    with running:
        try:
            yield running
        finally:
            if running.poll() is None:
                for child in psutil.Process(running.pid).children(recursive=True):
                    child.kill()
                running.kill()


def measured(*args: str) -> Mapping[str, Any]:
    with process(*QUICK, *args, "--json", "-") as running:
        stdout, stderr = running.communicate(timeout=PATIENCE_S)
        assert running.returncode == 0, stderr
    report: Mapping[str, Any] = json.loads(stdout)
    return report


def test_every_transport_is_told_in_all_numbers_and_has_moved_the_bytes_of_the_formula() -> None:
    report = measured("--transports", "shm,tcp,grpc")

    assert report["kv_bytes"] == report["wire_bytes"] == 2 * 40 * 32 * 8 * 128 * 2
    assert [row["transport"] for row in report["transports"]] == ["shm", "tcp", "grpc"]
    for row in report["transports"]:
        assert (row["skipped"], row["failed"]) == ("", "")
        assert row["bytes"] == report["wire_bytes"]
        assert all(row[name] > 0 for name in NUMBERS), row
        assert row["first_block_s"] <= row["last_block_s"]
        assert {kind: len(samples) for kind, samples in row["samples"].items()} == {
            "ours": 2,
            "bare": 2,
            "unchecked": 2,
        }
        for sample in row["samples"]["ours"]:
            assert sample["sender_cpu_s"] > 0 and sample["receiver_cpu_s"] > 0
    assert report["machine"]["cores"] == os.cpu_count()
    assert report["settings"]["layout"]["num_layers"] == 32


def test_compact_kv_has_a_byte_for_each_element_and_a_scale_for_each_row() -> None:
    report = measured("--layout", "smollm2-fp32", "--compact", "--transports", "tcp")

    rows = 2 * 40 * 30 * 3
    assert report["kv_bytes"] == rows * 64 * 4
    assert report["wire_bytes"] == report["transports"][0]["bytes"] == rows * (64 + 4)


def test_more_ranks_than_heads_get_each_head_several_times() -> None:
    report = measured("--tp", "2:16", "--transports", "shm")

    assert report["wire_bytes"] == 2 * report["kv_bytes"] == 2 * 2 * 40 * 32 * 8 * 128 * 2
    assert report["transports"][0]["bytes"] == report["wire_bytes"]


def test_a_link_made_slower_takes_its_time() -> None:
    report = measured("--transports", "tcp", "--bandwidth", "50MB", "--latency", "20ms")

    (row,) = report["transports"]
    assert row["last_block_s"] >= 2 * 40 * 32 * 8 * 128 * 2 / 50e6 + 2 * 0.020
    assert row["bare_gb_s"] <= 0.05


def test_two_commands_by_hand_are_one_measurement_and_both_end() -> None:
    with process("--listen", "127.0.0.1") as listening:
        assert listening.stdout is not None
        address = listening.stdout.readline().removeprefix("listening on ").strip()

        report = measured("--connect", address, "--transports", "tcp")

        assert listening.wait(timeout=PATIENCE_S) == 0
    assert report["transports"][0]["gb_s"] > 0


def test_without_a_terminal_there_is_a_table_and_nothing_else() -> None:
    with process(*QUICK, "--transports", "shm") as running:
        stdout, stderr = running.communicate(timeout=PATIENCE_S)

    assert stderr == ""
    assert "transport" in stdout
    assert "shm" in stdout
    assert "\x1b" not in stdout


def test_both_processes_end_when_the_one_that_was_started_is_interrupted_or_killed() -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        with process("--repeat", "100000", "--transports", "tcp") as running:
            child = wait_for_child(running.pid)

            running.send_signal(number)

            running.wait(timeout=PATIENCE_S)
            child.wait(timeout=PATIENCE_S)


def wait_for_child(pid: int) -> psutil.Process:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        for child in psutil.Process(pid).children():
            if any(connection.status == "ESTABLISHED" for connection in child.net_connections()):
                return child
        time.sleep(0.05)
    raise AssertionError("no other side has been met")


def test_whoever_holds_another_secret_is_sent_away(tmp_path: Path) -> None:
    secrets = []
    for name in ("one", "other"):
        secrets.append(tmp_path / name)
        secrets[-1].write_text(name * 16)
        secrets[-1].chmod(0o600)
    with process("--listen", "127.0.0.1", "--secret-file", str(secrets[0])) as listening:
        assert listening.stdout is not None
        address = listening.stdout.readline().removeprefix("listening on ").strip()

        with process(*QUICK, "--connect", address, "--secret-file", str(secrets[1])) as other:
            _, stderr = other.communicate(timeout=PATIENCE_S)

        assert other.returncode == 2
        assert "security.secret_file" in stderr
        assert listening.wait(timeout=PATIENCE_S) == 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--layout", "70b"], "--layout: 70b is none of 8b-bf16, smollm2-fp32"),
        (["--bytes", "1KiB"], "--bytes: 1024 is less than one token, 131072"),
        (["--bytes", "much"], "--bytes: 'much' is no size"),
        (["--bytes", "999TiB"], "--bytes: needs"),
        (["--tokens", "0"], "--tokens: 0 is less than 1"),
        (["--block-tokens", "0"], "--block-tokens: 0 is less than 1"),
        (["--message-bytes", "1GiB"], "--message-bytes: 1073741824 is more than"),
        (["--device", "tpu"], "--device: 'tpu' is none of cpu, cuda, cuda:N"),
        (["--repeat", "0"], "--repeat: 0 is less than 1"),
        (["--timeout", "0"], "--timeout: 0 s is not above 0"),
        (["--transports", "pigeon"], "--transports: pigeon is none of"),
        (["--transports", "loopback"], "--transports: loopback is none of"),
        (["--tp", "2"], "--tp: '2' is not P:D"),
        (["--tp", "3:1"], "--tp: 3 ranks and 8 KV heads do not divide each other"),
        (["--tp", "1:3"], "--tp: 3 ranks and 8 KV heads do not divide each other"),
        (["--bandwidth", "fast"], "--bandwidth: 'fast' is no size"),
        (["--latency", "5"], "--latency: '5' is no time such as 5ms"),
        (["--loss", "1"], "--loss: 1.0 is not in [0, 1)"),
        (["--wait", "5"], "--wait: goes with --listen"),
        (["--listen", "0.0.0.0"], "--listen: 0.0.0.0 is no address that the other side reaches"),
        (["--listen", "192.0.2.1"], "--listen: 192.0.2.1 can be reached from other machines, which needs"),
        (["--listen", "127.0.0.1", "--tokens", "5"], "--tokens: is for the side that connects to say"),
        (["--listen", "127.0.0.1", "--wait", "0.1"], "--wait: nobody has come in 0.1 s"),
        (["--connect", "127.0.0.1"], "--connect: '127.0.0.1' is not HOST:PORT"),
        (["--connect", "127.0.0.1:1"], "--connect: 127.0.0.1:1 does not answer"),
        (["--model", "/nowhere"], "--model: /nowhere does not exist"),
        (["--model", "/nowhere", "--bytes", "1MiB"], "--bytes: goes with --layout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [] if {"--tokens", "--bytes", "--listen"} & {*options} else ["--tokens", "1"]

    assert main(["kv-bench", *small, *options]) == 2

    assert problem in capsys.readouterr().err


def test_one_wrong_byte_changes_the_digest_of_its_head_and_no_other() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_tokens=4, dtype="float32")
    source = made_up(Probe(layout=layout, num_tokens=10))
    before = source.digests()

    source.caches[0].slots(1)[0][source.blocks[2] * 4 + 1, 1, 3] += 1

    after = source.digests()
    assert [head for head in (0, 1) if before[head] != after[head]] == [1]


def test_what_lies_behind_the_last_token_is_not_compared() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=4, dtype="float32")
    source = made_up(Probe(layout=layout, num_tokens=10))
    before = source.digests()

    source.caches[0].slots(0)[0][source.blocks[2] * 4 + 2] += 1

    assert source.digests() == before


def test_scattered_blocks_are_not_in_order_and_those_of_a_new_cache_are() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=4, dtype="float32")
    scattered = Probe(layout=layout, num_tokens=400)
    neighbours = Probe(layout=layout, num_tokens=400, scattered=False)

    assert sorted(ranks.blocks_of(scattered, seed=0)) == list(range(100))
    assert ranks.blocks_of(scattered, seed=0) != ranks.blocks_of(scattered, seed=1)
    assert ranks.blocks_of(neighbours, seed=0) == tuple(range(100))
