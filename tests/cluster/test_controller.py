"""The controller does not go on answering when it does nothing any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from twinpool.cluster.config import DeploymentConfig
from twinpool.cluster.controller import Controller
from twinpool.cluster.pools import Pools
from twinpool.cluster.roster import Member
from twinpool.cluster.serve import deployment_spec
from twinpool.core.ports import Role

WANTED = (Member(worker_id="decode-0", pool=Role.DECODE, role=Role.DECODE),)


class Broken(Controller):
    def _tick(self, pools: Pools) -> None:
        raise KeyError("a bug")


def test_a_controller_that_broke_says_so_to_its_owner(tmp_path: Path) -> None:
    async def run() -> None:
        spec = deployment_spec(DeploymentConfig(), folder=tmp_path, name="toy", join="127.0.0.1:1")
        controller = Broken(spec)
        assert await controller.sync(WANTED) == ()
        async with asyncio.timeout(20):
            with pytest.raises(KeyError, match="a bug"):
                while True:
                    await controller.sync(WANTED)
                    await asyncio.sleep(0.01)

    asyncio.run(run())
