"""What `twinpool serve` checks before anything starts, and what it tells the processes that it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.config import TransferConfig
from router.http.config import HTTPConfig
from twinpool.cluster.config import DeploymentConfig, WorkerConfig
from twinpool.cluster.serve import check_reachable, deployment_spec, shown_settings
from twinpool.core.config import unbind
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role

ELSEWHERE = DeploymentConfig(ray_address="10.0.0.1:6379", join_host="10.0.0.2")


@pytest.mark.parametrize("join_host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::"])
def test_workers_elsewhere_need_an_address_that_they_reach(
    join_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")

    check_reachable(ELSEWHERE)
    with pytest.raises(ConfigError, match=f"join_host: {join_host} is out of reach for workers of Ray at 10"):
        check_reachable(replace(ELSEWHERE, join_host=join_host))


def test_ray_elsewhere_needs_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    check_reachable(DeploymentConfig())
    check_reachable(DeploymentConfig(ray_address="127.0.0.1:6379"))
    with pytest.raises(ConfigError, match="ray_address: RAY_AUTH_MODE is not token"):
        check_reachable(ELSEWHERE)


def test_the_api_key_stays_in_the_server() -> None:
    config = DeploymentConfig(http=HTTPConfig(api_key="geheim"))

    spec = deployment_spec(config, folder=Path("/m"), name="toy", join="127.0.0.1:1")

    assert "geheim" not in json.dumps(unbind(spec))
    assert (spec.worker.model, spec.worker.model_name) == ("/m", "toy")


def test_workers_listen_on_loopback_unless_they_must_be_reached_from_elsewhere() -> None:
    def of(join: str) -> bool:
        return deployment_spec(DeploymentConfig(), folder=Path("/m"), name="toy", join=join).is_on_loopback

    assert [of(join) for join in ("127.0.0.1:1", "[::1]:1", "localhost:1")] == [True, True, True]
    assert [of(join) for join in ("10.0.0.2:1", "[fd00::1]:1")] == [False, False]


def test_what_is_shown_of_the_settings_holds_no_key_and_decides_how_it_answers() -> None:
    config = DeploymentConfig(threads=3, http=HTTPConfig(api_key="hush"))

    shown = shown_settings(config)

    assert shown["threads"] == 3
    assert shown["router"]["policy"] == "least_loaded"  # type: ignore[index]
    assert "hush" not in json.dumps(shown)


def test_workers_that_are_started_elsewhere_have_settings_of_their_own() -> None:
    assert set(shown_settings(DeploymentConfig(without_ray=True))) == {
        "model",
        "model_name",
        "placement",
        "router",
    }


def test_a_transport_that_reaches_no_other_process_is_refused_before_anything_loads() -> None:
    transfer = TransferConfig(transports=("tcp", "loopback"))

    with pytest.raises(ConfigError, match=r"^transfer.transports: loopback reaches no other process"):
        DeploymentConfig(transfer=transfer)
    with pytest.raises(ConfigError, match=r"^transfer.transports: loopback reaches no other process"):
        WorkerConfig(worker_id="w", role=Role.DECODE, generation=1, join="127.0.0.1:1", transfer=transfer)
