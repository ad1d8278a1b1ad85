"""`twinpool certs` writes what `--certs` reads, for nobody else, and replaces nothing unasked."""

from __future__ import annotations

import argparse
import stat
from pathlib import Path

import pytest
from cryptography import x509

from twinpool.cli import main
from twinpool.cli.app import parser
from twinpool.cli.run import deployment_config, worker_config
from twinpool.cluster.trust import server_trust, worker_trust
from twinpool.core.tls import Party

FILES = ["ca.key", "ca.pem", "router.key", "router.pem", "secret", "worker.key", "worker.pem"]


def options(*args: str) -> argparse.Namespace:
    return parser().parse_args(args)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 2
    return capsys.readouterr().err


def names_in(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def test_what_it_writes_is_told_and_is_for_the_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"

    assert main(["certs", str(folder)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[: len(FILES)]) == [str(folder / name) for name in FILES]
    assert f"twinpool serve --certs {folder}" in "\n".join(lines)
    assert sorted(contents(folder)) == FILES
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_serve_and_worker_find_their_files_there(tmp_path: Path) -> None:
    main(["certs", str(tmp_path)])

    router = server_trust(deployment_config(options("serve", "--certs", str(tmp_path))))
    worker = worker_trust(
        worker_config(options("worker", "--certs", str(tmp_path), "--role", "decode", "--join", "r:1"))
    )

    assert router.party is Party.ROUTER and worker.party is Party.WORKER
    assert router.is_closed and worker.is_closed
    assert router.secret.key == worker.secret.key == (tmp_path / "secret").read_bytes().strip()


def test_an_option_beats_the_folder(tmp_path: Path) -> None:
    config = deployment_config(options("serve", "--certs", str(tmp_path), "--tls-cert", "mine.pem"))

    assert config.security.tls_cert == Path("mine.pem")
    assert config.security.tls_key == tmp_path / "router.key"
    assert config.security.of_workers().tls_cert == tmp_path / "worker.pem"


def test_a_ca_is_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["certs", str(tmp_path)])
    before = contents(tmp_path)

    assert "has a CA already; --renew makes new certificates" in refusal(capsys, "certs", str(tmp_path))
    assert contents(tmp_path) == before

    assert main(["certs", str(tmp_path), "--new-ca"]) == 0
    after = contents(tmp_path)
    assert all(after[name] != before[name] for name in FILES)


def test_renewed_certificates_are_trusted_by_those_who_have_the_ca(tmp_path: Path) -> None:
    main(["certs", str(tmp_path)])
    before = contents(tmp_path)

    assert main(["certs", str(tmp_path), "--renew", "--days", "7"]) == 0

    after = contents(tmp_path)
    assert [name for name in FILES if after[name] == before[name]] == ["ca.key", "ca.pem", "secret"]
    assert server_trust(deployment_config(options("serve", "--certs", str(tmp_path)))).is_closed


def test_nothing_is_renewed_where_there_is_no_ca(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ca.pem cannot be read" in refusal(capsys, "certs", str(tmp_path), "--renew")


def test_more_names_stand_beside_that_of_the_party(tmp_path: Path) -> None:
    main(["certs", str(tmp_path), "--hosts", "10.0.0.7", "fd00::7", "gpu-7.example"])

    assert names_in(tmp_path / "router.pem") == ["router.twinpool", "gpu-7.example", "10.0.0.7", "fd00::7"]
    assert names_in(tmp_path / "worker.pem") == ["worker.twinpool", "gpu-7.example", "10.0.0.7", "fd00::7"]


@pytest.mark.parametrize(
    "host", ["router.twinpool", "ROUTER.Twinpool.", "twinpool", "*.twinpool", "*", "a b", ""]
)
def test_no_host_can_be_a_party(tmp_path: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--hosts: " in refusal(capsys, "certs", str(tmp_path / "certs"), "--hosts", host)
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize("days", ["0", "-1", "3651"])
def test_days_have_a_range(tmp_path: Path, days: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--days: {days} is not in [1, 3650]" in refusal(capsys, "certs", str(tmp_path), "--days", days)


def test_a_secret_is_not_taken_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(
        capsys,
        "worker",
        "--role",
        "decode",
        "--join",
        "r:1",
        "--set",
        "secret=00112233445566778899aabbccddeeff",
    )

    assert "secret: can be read by others" in error
    assert "0011" not in error
