"""What `serve` and `worker` prove themselves with, and which addresses they dare to listen on."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.config import TransferConfig
from router.http.config import HTTPConfig
from twinpool.cli import main
from twinpool.cluster.config import DeploymentConfig, DeploymentSecurityConfig, DeploymentSpec, WorkerConfig
from twinpool.cluster.private_ca import Wanted, make_files
from twinpool.cluster.serve import deployment_spec
from twinpool.cluster.trust import secret_for_workers, server_trust, warn_of_open_api, worker_trust
from twinpool.core.config import bind, unbind
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.core.secret import Secret
from twinpool.core.security import SecurityConfig

HEX = "00112233445566778899aabbccddeeff"
WORKER = WorkerConfig(worker_id="w", role=Role.DECODE, generation=1, join="127.0.0.1:1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_files(tmp_path, Wanted())
    return tmp_path


def of_server(folder: Path) -> DeploymentSecurityConfig:
    return DeploymentSecurityConfig(
        secret_file=folder / "secret",
        tls_cert=folder / "router.pem",
        tls_key=folder / "router.key",
        tls_ca=folder / "ca.pem",
        worker_tls_cert=folder / "worker.pem",
        worker_tls_key=folder / "worker.key",
    )


def spec_of(config: DeploymentConfig) -> DeploymentSpec:
    trust = server_trust(config)
    return deployment_spec(
        config, folder=Path("/m"), name="toy", join="127.0.0.1:1", secret=secret_for_workers(config, trust)
    )


def test_workers_that_serve_starts_share_a_new_secret_with_it() -> None:
    config = DeploymentConfig()
    trust = server_trust(config)

    worker = bind(
        WorkerConfig, json.loads(json.dumps(unbind(WORKER))) | {"secret": secret_for_workers(config, trust)}
    )

    assert trust.secret.is_set
    assert worker_trust(worker).secret.key == trust.secret.key
    assert server_trust(config).secret.key != trust.secret.key


def test_a_secret_of_a_file_does_not_travel(folder: Path) -> None:
    config = DeploymentConfig(security=of_server(folder))
    secret = Secret.from_file(folder / "secret")

    spec = spec_of(config)

    assert secret.key.hex() not in json.dumps(unbind(spec))
    assert secret.key.decode() not in json.dumps(unbind(spec))
    assert worker_trust(spec.worker).secret.key == secret.key
    assert worker_trust(spec.worker).is_closed


def test_workers_are_told_their_files_wherever_they_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)

    told = spec_of(DeploymentConfig(security=of_server(Path()))).worker.security

    assert told == SecurityConfig(
        secret_file=folder / "secret",
        tls_cert=folder / "worker.pem",
        tls_key=folder / "worker.key",
        tls_ca=folder / "ca.pem",
    )


def test_the_secret_is_in_no_repr_and_on_no_printed_page(capsys: pytest.CaptureFixture[str]) -> None:
    worker = replace(WORKER, secret=HEX)
    spec = replace(spec_of(DeploymentConfig()), worker=worker)

    assert HEX not in repr(worker) + repr(spec) + repr(worker_trust(worker))
    assert main(["worker", "--role", "decode", "--join", "r:1", "--print-config"]) == 0
    assert "secret: ''" in capsys.readouterr().out
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301 - what Ray does with it on its way to a worker


def test_workers_by_hand_need_no_secret_on_this_machine() -> None:
    assert not server_trust(DeploymentConfig(without_ray=True)).secret.is_set
    assert not worker_trust(WORKER).secret.is_set


@pytest.mark.parametrize("name", ["worker_tls_cert", "worker_tls_key"])
def test_workers_that_serve_starts_need_certificates_of_their_own(folder: Path, name: str) -> None:
    config = DeploymentConfig(security=replace(of_server(folder), **{name: None}))

    with pytest.raises(ConfigError, match=f"security.{name}: is missing"):
        server_trust(config)
    assert server_trust(replace(config, without_ray=True)).is_closed


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_serve_lets_no_stranger_join(host: str, folder: Path) -> None:
    open_to_all = DeploymentConfig(join_host=host)

    with pytest.raises(ConfigError, match=rf"^join_host: {host} can be reached .*certificates"):
        server_trust(open_to_all)
    with pytest.raises(ConfigError, match="a shared secret"):
        server_trust(replace(open_to_all, without_ray=True))
    assert server_trust(replace(open_to_all, security=of_server(folder))).is_closed
    insecure = server_trust(replace(open_to_all, security=DeploymentSecurityConfig(insecure=True)))
    assert insecure.describe() == "secret, INSECURE"


def test_a_worker_lets_no_stranger_in(folder: Path) -> None:
    doors = {
        "host": replace(WORKER, host="10.1.2.3"),
        "transfer.listen": replace(WORKER, transfer=TransferConfig(listen="0.0.0.0:0", advertise_host="me")),
    }

    for field, config in doors.items():
        with pytest.raises(ConfigError, match=f"^{field}: "):
            worker_trust(config)
        assert worker_trust(replace(config, security=of_server(folder).of_workers())).is_closed
        insecure = replace(config, security=SecurityConfig(insecure=True))
        assert worker_trust(insecure).describe() == "nothing, INSECURE"


def test_kv_that_stays_on_this_machine_needs_nothing() -> None:
    name = "0123456789abcdef.4026531840/twinpool-0"  # as `shm` and `cuda_ipc` spell where they listen

    for listen in ("", "127.0.0.1:0", "[::1]:7000", name):
        assert not worker_trust(replace(WORKER, transfer=TransferConfig(listen=listen))).is_closed
    for wildcard in (":0", "[::]:0"):
        with pytest.raises(ConfigError, match=r"^transfer\.listen: "):
            worker_trust(replace(WORKER, transfer=TransferConfig(listen=wildcard, advertise_host="me")))


def test_the_command_line_refuses_before_it_loads_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--join-host", "0.0.0.0", "--model", "no-such-model"]) == 2
    assert "join_host: 0.0.0.0 can be reached from other machines" in capsys.readouterr().err


def test_an_api_that_is_open_to_others_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for http in (HTTPConfig(), HTTPConfig(host="0.0.0.0", api_key="key")):
        warn_of_open_api(DeploymentConfig(http=http))
    assert caplog.text == ""

    warn_of_open_api(DeploymentConfig(http=HTTPConfig(host="0.0.0.0")))

    assert "http.host 0.0.0.0 can be reached from other machines and asks for no API key" in caplog.text
