"""A whole deployment on real Ray: it answers, survives, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.checkpoints_toy import make_checkpoint
from tests.cluster.servers import PATIENCE_S, all_gone, serving, terminate
from tests.patience import until
from twinpool.core.errors import ServingError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy"), "llama")


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def listening_addresses(processes: list[psutil.Process]) -> set[str]:
    addresses = set()
    for process in processes:
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                addresses.add(connection.laddr.ip.removeprefix("::ffff:"))
    return addresses


def test_a_deployment_answers_survives_its_workers_and_ray_and_leaves_nothing(model: Path) -> None:
    with serving(model, "--prefill", "1", "--decode", "1") as server:
        expected = server.answer()
        workers = {worker["id"]: worker for worker in server.client.get("/admin/workers")}
        assert {name: worker["role"] for name, worker in workers.items()} == {
            "prefill-0": "prefill",
            "decode-0": "decode",
        }
        assert listening_addresses([psutil.Process(server.process.pid), *server.descendants()]) == {
            "127.0.0.1"
        }

        os.kill(workers["decode-0"]["pid"], signal.SIGKILL)

        def is_replaced() -> bool:
            for worker in server.client.get("/admin/workers"):
                if worker["id"] == "decode-0" and worker["generation"] > workers["decode-0"]["generation"]:
                    return bool(worker["state"] == "ready")
            return False

        assert until(is_replaced, within_s=PATIENCE_S)
        assert server.answer() == expected
        (report,) = [
            each
            for each in server.client.get("/admin/deployment")["workers"]
            if each["worker_id"] == "decode-0"
        ]
        assert report["last_failure"].startswith("killed by SIGKILL")

        server.client.post("/admin/scale", {"prefill": 2})
        server.client.post("/admin/replace", {"worker": "prefill-0"})

        def is_scaled() -> bool:
            there = {worker["id"]: worker for worker in server.client.get("/admin/workers")}
            return (
                set(there) == {"prefill-0", "prefill-1", "decode-0"}
                and there["prefill-0"]["generation"] > workers["prefill-0"]["generation"]
                and all(worker["state"] == "ready" for worker in there.values())
            )

        assert until(is_scaled, within_s=PATIENCE_S)
        server.client.post("/admin/scale", {"prefill": 1})
        assert until(lambda: len(server.client.get("/admin/workers")) == 2, within_s=PATIENCE_S)
        with pytest.raises(ServingError, match="0 workers cannot follow 1"):
            server.client.post("/admin/scale", {"decode": 0})
        assert server.answer() == expected

        (store,) = [process for process in server.descendants() if process.name() == "gcs_server"]
        store.kill()
        assert [server.answer() for _ in range(5)] == [expected] * 5

        started = server.descendants()
        assert terminate(server) == 0
        assert until(lambda: all_gone(started), within_s=1.0)
        assert list(server.folder.iterdir()) == []
        with pytest.raises(ServingError, match="nothing listens at"):
            server.client.get("/health")


def test_a_server_that_is_killed_takes_everything_with_it(model: Path) -> None:
    with serving(model, "--colocated", "1") as server:
        started = server.descendants()
        assert len(started) > 4

        server.process.kill()

        assert until(lambda: all_gone(started), within_s=20.0)
        assert until(lambda: list(server.folder.iterdir()) == [], within_s=5.0)


def test_a_server_whose_agent_dies_ends_and_says_so(model: Path) -> None:
    with serving(model, "--colocated", "1") as server:
        started = server.descendants()
        (agent,) = [process for process in started if "twinpool.cluster.agent" in process.cmdline()]

        agent.kill()

        assert server.process.wait(PATIENCE_S) == 1
        assert until(lambda: all_gone(started), within_s=20.0)
        last = server.log.read_text().splitlines()[-1]
        assert last == "twinpool: error: the agent ended with exit code -9"


def test_workers_that_lose_ray_go_on_until_their_successors_join(model: Path) -> None:
    with serving(model, "--colocated", "1") as server:
        expected = server.answer()
        (first,) = server.client.get("/admin/workers")
        (raylet,) = [process for process in server.descendants() if process.name() == "raylet"]

        raylet.kill()
        answers = []

        def is_succeeded() -> bool:
            answers.append(server.answer())
            workers = server.client.get("/admin/workers")
            return [worker["generation"] > first["generation"] for worker in workers] == [True]

        assert until(is_succeeded, within_s=PATIENCE_S)
        assert answers == [expected] * len(answers)
        assert until(lambda: not psutil.pid_exists(first["pid"]), within_s=20.0)
        started = server.descendants()
        assert terminate(server) == 0
        assert until(lambda: all_gone(started), within_s=1.0)


def run_serve(*options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "twinpool", "serve", *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_driver_that_got_no_time_for_long_finds_its_workers_ended_and_starts_them_again(
    model: Path,
) -> None:
    with serving(model, "--prefill", "1", "--decode", "1") as server:
        expected = server.answer()
        (driver,) = [each for each in server.descendants() if "twinpool.cluster.ray_driver" in each.cmdline()]

        driver.suspend()
        try:
            assert until(lambda: not server.client.get("/admin/workers"), within_s=PATIENCE_S)
        finally:
            driver.resume()

        assert until(lambda: len(server.client.get("/admin/workers")) == 2, within_s=PATIENCE_S)
        assert server.answer() == expected
        assert server.client.get("/admin/deployment")["ray"] == "ok"
        left = server.descendants()
        assert terminate(server) == 0
        assert until(lambda: all_gone(left), within_s=10.0)


def test_a_busy_port_is_told_before_anything_starts(model: Path, busy_port: int) -> None:
    code, stderr = run_serve("--model", str(model), "--port", str(busy_port))

    assert code == 2
    assert (
        stderr == f"twinpool: error: --port: cannot listen on 127.0.0.1:{busy_port}: Address already in use\n"
    )


def test_a_model_that_does_not_exist_is_told_before_anything_starts() -> None:
    code, stderr = run_serve("--model", "/no/such/model", "--port", "0")

    assert code == 2
    assert stderr == "twinpool: error: --model: /no/such/model does not exist\n"


def test_a_worker_that_cannot_start_ends_the_server_with_its_reason(model: Path) -> None:
    code, stderr = run_serve("--model", str(model), "--port", "0", "--kv-memory", "1KiB")

    assert code == 1
    assert "--kv-memory: 1024 bytes hold 0 blocks" in stderr.splitlines()[-1]


def test_a_worker_without_a_place_ends_a_server_that_can_never_have_one(model: Path) -> None:
    code, stderr = run_serve(
        "--model", str(model), "--port", "0", "--colocated", "1", "--set", "pools.colocated.num_gpus=800"
    )

    assert code == 1
    assert "colocated-0 needs 800 GPUs, the cluster has " in stderr.splitlines()[-1]
