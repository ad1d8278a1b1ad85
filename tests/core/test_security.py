"""What a process proves itself with: a file that does not fit is refused at the start, with its setting."""

from __future__ import annotations

import datetime
import logging
import socket
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from twinpool.cluster.private_ca import PrivateCA, Wanted, make_files, write_files
from twinpool.core.config import bind
from twinpool.core.doors import check_door, is_loopback
from twinpool.core.errors import ConfigError, Untrusted
from twinpool.core.secret import Secret
from twinpool.core.security import SecurityConfig, Trust, load_trust
from twinpool.core.tls import Party, check_peer

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_files(tmp_path / "certs", Wanted())
    return tmp_path / "certs"


def config(folder: Path, party: Party = Party.WORKER) -> SecurityConfig:
    return SecurityConfig(
        secret_file=folder / "secret",
        tls_cert=folder / f"{party}.pem",
        tls_key=folder / f"{party}.key",
        tls_ca=folder / "ca.pem",
    )


def reissue(folder: Path, *, days: int, now: datetime.datetime) -> None:
    """Put a worker's certificate of another time into ``folder``."""
    write_files(folder, PrivateCA.load(folder).files_of(Party.WORKER, Wanted(days=days), now=now))


@pytest.mark.parametrize("party", list(Party))
def test_files_that_fit_are_taken(folder: Path, party: Party) -> None:
    trust = load_trust(config(folder, party), party=party)

    assert trust.is_closed
    assert trust.secret.key == (folder / "secret").read_bytes().strip()
    assert trust.tls is not None and trust.tls.cert == (folder / f"{party}.pem").read_bytes()


def test_two_of_three_files_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"security.tls_ca: is missing: tls_cert, tls_key and tls_ca go together"
    ):
        bind(SecurityConfig, {"tls_cert": "c.pem", "tls_key": "c.key"}, "security")


@pytest.mark.parametrize(
    ("field", "name"),
    [("secret_file", "secret"), ("tls_cert", "worker.pem"), ("tls_key", "worker.key"), ("tls_ca", "ca.pem")],
)
def test_a_missing_file_is_named_with_its_setting(folder: Path, field: str, name: str) -> None:
    (folder / name).unlink()

    with pytest.raises(ConfigError, match=f"security.{field}: .*/{name} cannot be read: No such file"):
        load_trust(config(folder), party=Party.WORKER)


@pytest.mark.parametrize(("field", "name"), [("secret_file", "secret"), ("tls_key", "worker.key")])
def test_a_secret_that_everybody_can_read_is_none(folder: Path, field: str, name: str) -> None:
    (folder / name).chmod(0o604)

    with pytest.raises(ConfigError, match=f"security.{field}: .*/{name} can be read by everybody"):
        load_trust(config(folder), party=Party.WORKER)


@pytest.mark.parametrize("name", ["worker.pem", "worker.key", "ca.pem"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04junk", b"-----BEGIN CERTIFICATE-----\nx\n"])
def test_a_file_of_something_else_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)

    with pytest.raises(ConfigError, match=r"security.tls_(cert|key|ca): the file holds no "):
        load_trust(config(folder), party=Party.WORKER)


def test_an_expired_certificate_is_refused(folder: Path) -> None:
    reissue(folder, days=1, now=NOW - datetime.timedelta(days=2))

    with pytest.raises(ConfigError, match=r"security.tls_cert: CN=worker.twinpool expired on 20\d\d-"):
        load_trust(config(folder), party=Party.WORKER)


def test_a_certificate_of_the_future_is_refused(folder: Path) -> None:
    reissue(folder, days=5, now=NOW + datetime.timedelta(days=1))

    with pytest.raises(
        ConfigError, match=r"security.tls_cert: CN=worker.twinpool is not valid before 20\d\d-"
    ):
        load_trust(config(folder), party=Party.WORKER)


def test_a_certificate_that_expires_soon_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reissue(folder, days=3, now=NOW)

    with caplog.at_level(logging.WARNING):
        load_trust(config(folder), party=Party.WORKER)

    assert "a certificate expires in 3.0 days" in caplog.text


def test_a_key_of_another_certificate_is_refused(folder: Path) -> None:
    (folder / "worker.key").write_bytes((folder / "router.key").read_bytes())

    with pytest.raises(ConfigError, match=r"security.tls_key: the key does not belong to the certificate"):
        load_trust(config(folder), party=Party.WORKER)


def test_a_locked_key_is_refused(folder: Path) -> None:
    locked = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
    )
    (folder / "worker.key").write_bytes(locked)

    with pytest.raises(ConfigError, match=r"security.tls_key: the key is locked with a password"):
        load_trust(config(folder), party=Party.WORKER)


def test_a_certificate_of_another_ca_is_refused(folder: Path, tmp_path: Path) -> None:
    make_files(tmp_path / "other", Wanted())
    (folder / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())

    with pytest.raises(
        ConfigError, match=r"security.tls_ca: .*ca.pem did not sign the certificate in .*worker"
    ):
        load_trust(config(folder), party=Party.WORKER)


def test_one_of_several_authorities_is_enough(folder: Path, tmp_path: Path) -> None:
    """So a CA is replaced without a stop: for a while both are trusted."""
    make_files(tmp_path / "other", Wanted())
    both = (tmp_path / "other" / "ca.pem").read_bytes() + (folder / "ca.pem").read_bytes()
    (folder / "ca.pem").write_bytes(both)

    trust = load_trust(config(folder), party=Party.WORKER)

    assert trust.tls is not None
    assert len(trust.tls.client_context().get_ca_certs()) == 2


def test_a_worker_does_not_start_with_the_certificate_of_the_router(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"its certificate is for router.twinpool, not for worker.twinpool"):
        load_trust(config(folder, Party.ROUTER), party=Party.WORKER)


def test_a_peer_without_a_name_is_refused() -> None:
    with pytest.raises(Untrusted, match=r"the peer's certificate is for nobody, not for worker.twinpool"):
        check_peer((), Party.WORKER)


def test_what_is_secret_is_never_shown(folder: Path) -> None:
    trust = load_trust(config(folder), party=Party.WORKER)

    shown = repr(trust)
    assert trust.secret.key.decode() not in shown
    assert "PRIVATE KEY" not in shown
    assert "Secret(set)" in shown


def test_a_secret_of_a_few_letters_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(b" letmein \n")

    with pytest.raises(ConfigError, match="holds 7 bytes, needed are 16 to 4096"):
        load_trust(SecurityConfig(secret_file=path), party=Party.WORKER)


def test_a_device_without_an_end_is_no_secret() -> None:
    with pytest.raises(ConfigError, match=r"security.secret_file: /dev/zero (is larger than|can be read by)"):
        load_trust(SecurityConfig(secret_file=Path("/dev/zero")), party=Party.WORKER)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "::ffff:127.0.0.1", "localhost"])
def test_addresses_of_this_machine_need_nothing(host: str) -> None:
    check_door("host", host, Trust(party=Party.WORKER))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.1.2.3", "0", "::ffff:10.1.2.3", "fe80::1"])
def test_other_addresses_need_certificates_and_a_secret(host: str, folder: Path) -> None:
    whole = load_trust(config(folder), party=Party.WORKER)
    missing = {
        "certificates .* and a shared secret": Trust(party=Party.WORKER),
        "certificates": Trust(party=Party.WORKER, secret=Secret.random()),
        "a shared secret": Trust(party=Party.WORKER, tls=whole.tls),
    }

    check_door("host", host, whole)
    for what, trust in missing.items():
        with pytest.raises(
            ConfigError, match=f"^host: .*can be reached from other machines, which needs {what}"
        ):
            check_door("host", host, trust)


def test_what_is_insecure_on_purpose_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_door("host", "0.0.0.0", Trust(party=Party.WORKER, insecure=True))

    assert "insecure: host 0.0.0.0 can be reached from other machines, without certificates" in caplog.text


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"join_host: no.such.host.invalid cannot be resolved"):
        check_door("join_host", "no.such.host.invalid", Trust(party=Party.ROUTER))


def test_a_name_is_what_it_resolves_to() -> None:
    assert is_loopback("host", "localhost")
    assert not is_loopback("host", "0.0.0.0")


def test_a_name_with_one_address_elsewhere_is_not_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.1", "10.1.2.3")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: answers)

    assert not is_loopback("host", "two.faces.example")
