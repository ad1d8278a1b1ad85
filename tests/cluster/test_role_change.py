"""Roles under Ray: pool sizes follow them, and a worker that is restarted comes back as what it was made."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints_toy import make_checkpoint
from tests.cluster.servers import PATIENCE_S, Server, serving
from tests.patience import until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy"), "llama")


def members(server: Server) -> dict[str, dict[str, Any]]:
    return {worker["id"]: worker for worker in server.client.get("/admin/workers")}


def are_ready(server: Server, **roles: str) -> bool:
    """Whether just these workers are there, ready, in these roles; and wanted in these roles."""
    there, wanted = members(server), server.client.get("/admin/deployment")["workers"]
    expected = {name.replace("_", "-"): role for name, role in roles.items()}
    return (
        {name: worker["role"] for name, worker in there.items()} == expected
        and {worker["state"] for worker in there.values()} == {"ready"}
        and {worker["worker_id"]: worker["role"] for worker in wanted} == expected
    )


@pytest.mark.slow
def test_pools_follow_the_roles_of_their_workers_and_so_do_restarted_ones(model: Path) -> None:
    with serving(model, "--prefill", "1", "--decode", "2", "--decode-tensor-parallel", "2") as server:
        expected = server.answer()
        before = members(server)

        done = server.client.post("/admin/workers/decode-1/role", {"role": "prefill"})
        assert (done["was"], done["role"]) == ("decode", "prefill")
        assert until(
            lambda: are_ready(server, prefill_0="prefill", decode_0="decode", decode_1="prefill"),
            within_s=10.0,
        )
        assert {name: worker["pid"] for name, worker in members(server).items()} == {
            name: worker["pid"] for name, worker in before.items()
        }
        assert server.answer() == expected

        os.kill(before["decode-1"]["pid"], signal.SIGKILL)
        assert until(
            lambda: members(server).get("decode-1", before["decode-1"])["pid"] != before["decode-1"]["pid"],
            within_s=PATIENCE_S,
        )
        assert until(
            lambda: are_ready(server, prefill_0="prefill", decode_0="decode", decode_1="prefill"),
            within_s=PATIENCE_S,
        )
        assert len(members(server)["decode-1"]["ranks"]) == 2  # of its pool, as ever
        assert server.answer() == expected

        generations = {name: worker["generation"] for name, worker in members(server).items()}
        (raylet,) = [process for process in server.descendants() if process.name() == "raylet"]
        raylet.kill()  # whoever starts the workers anew has to be told of their roles
        assert until(
            lambda: (
                are_ready(server, prefill_0="prefill", decode_0="decode", decode_1="prefill")
                and all(w["generation"] > generations[name] for name, w in members(server).items())
            ),
            within_s=PATIENCE_S,
        ), members(server)
        assert server.log.read_text().count("worker decode-1 (decode) joined") == 1
        assert server.answer() == expected

        server.client.post("/admin/scale", {"prefill": 1, "decode": 2})
        assert until(
            lambda: are_ready(server, prefill_0="prefill", decode_0="decode", decode_2="decode"),
            within_s=PATIENCE_S,
        ), server.client.get("/admin/deployment")
        assert [server.answer() for _ in range(3)] == [expected] * 3
