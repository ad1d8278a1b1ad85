"""The agent obeys its server, also while no driver runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from twinpool.cluster.config import DeploymentConfig
from twinpool.cluster.serve import deployment_spec
from twinpool.core.config import unbind

CRASHING = """
from twinpool.cluster import agent

class Crashing(agent._Agent):
    def _run_driver(self, folder):
        self._has_workers = True
        return 9

agent._RESTART_AFTER_S, agent._Agent = 600.0, Crashing
agent.main()
"""


@pytest.mark.parametrize("order", ['{"op": "want", "workers": []}\n{"op": "stop"}\n', ""])
def test_an_order_to_stop_does_not_wait_for_the_next_start_of_ray(order: str, tmp_path: Path) -> None:
    spec = deployment_spec(DeploymentConfig(), folder=tmp_path, name="toy", join="127.0.0.1:1")

    done = subprocess.run(
        [sys.executable, "-c", CRASHING],
        input=json.dumps(unbind(spec)) + "\n" + order,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["away", "stopped"]
    assert done.returncode == 0, done.stderr
