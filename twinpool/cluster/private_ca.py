"""Makes the certificates of a deployment: a CA of its own, and one certificate for each party.

    ca.pem                    given to every process; signs nothing but what is made here
    ca.key                    needed again for `--renew` only: keep it off the machines that serve
    router.pem, router.key    names router.twinpool
    worker.pem, worker.key    names worker.twinpool
    secret                    random, for `--secret-file`

Every file is readable by its owner alone.  A file appears whole or not at all.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from twinpool.core.errors import ConfigError
from twinpool.core.files import read_file, read_private_file
from twinpool.core.tls import PARTY_DOMAIN, Party

CA_DAYS = 3650
_EARLY = datetime.timedelta(minutes=5)  # for peers whose clocks are a little behind
_HOST = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the certificates are to say."""

    hosts: tuple[str, ...] = ()  # names and addresses beside those of the parties, for foreign clients
    days: int = 365  # until the certificates of the parties expire

    def __post_init__(self) -> None:
        if not 1 <= self.days <= CA_DAYS:
            raise ConfigError("--days", f"{self.days} is not in [1, {CA_DAYS}]")
        for host in self.hosts:
            if host.lower().rstrip(".").split(".")[-1] == PARTY_DOMAIN:
                raise ConfigError("--hosts", f"{host} would let every worker pose as another party")
            _name_of(host)


class PrivateCA:
    """Signs certificates of parties.

    Args:
        certificate: Of the CA.
        key: Its private key.
    """

    def __init__(self, certificate: x509.Certificate, key: CertificateIssuerPrivateKeyTypes) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def new(cls, *, now: datetime.datetime) -> PrivateCA:
        """Make one with a key that nobody has seen."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _subject(f"Twinpool CA {secrets.token_hex(4)}")
        last = now + datetime.timedelta(days=CA_DAYS)
        builder = _builder(subject=name, issuer=name, key=key, first=now - _EARLY, last=last)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, folder: Path) -> PrivateCA:
        """Read the one of a folder.

        Raises:
            ConfigError: It is not there, or cannot be used.
        """
        try:
            certificate = x509.load_pem_x509_certificate(read_file("certs", folder / "ca.pem"))
            key = load_pem_private_key(read_private_file("certs", folder / "ca.key"), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError("certs", f"{folder} holds no usable CA: {error}") from error
        assert isinstance(key, ec.EllipticCurvePrivateKey), "we make no others"
        return cls(certificate, key)

    def files(self) -> dict[str, bytes]:
        """Return what ``load`` reads, by file name."""
        return {"ca.pem": self._certificate.public_bytes(Encoding.PEM), "ca.key": _pem(self._key)}

    def files_of(self, party: Party, wanted: Wanted, *, now: datetime.datetime) -> dict[str, bytes]:
        """Return a new certificate of ``party`` and its key, by file name."""
        key = ec.generate_private_key(ec.SECP256R1())
        last = min(now + datetime.timedelta(days=wanted.days), self._certificate.not_valid_after_utc)
        builder = _builder(
            subject=_subject(party.dns_name),
            issuer=self._certificate.subject,
            key=key,
            first=now - _EARLY,
            last=last,
        )
        names = [x509.DNSName(party.dns_name), *map(_name_of, wanted.hosts)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        for extension, is_critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage(usages), False),
            (x509.SubjectAlternativeName(names), False),
            (identifier, False),
        ):
            builder = builder.add_extension(extension, critical=is_critical)
        certificate = builder.sign(self._key, hashes.SHA256())
        return {f"{party}.pem": certificate.public_bytes(Encoding.PEM), f"{party}.key": _pem(key)}


def make_files(folder: Path, wanted: Wanted) -> Sequence[Path]:
    """Make a CA, the certificates of both parties and a secret; return what was written.

    Raises:
        ConfigError: There is a CA already, or nothing can be written.
    """
    if (folder / "ca.pem").exists() or (folder / "ca.key").exists():
        raise ConfigError(
            "certs",
            f"{folder} has a CA already; --renew makes new certificates of it, --new-ca replaces everything",
        )
    return replace_files(folder, wanted)


def replace_files(folder: Path, wanted: Wanted) -> Sequence[Path]:
    """As ``make_files``, whatever is there: no process with older files is trusted any more."""
    now = datetime.datetime.now(datetime.UTC)
    authority = PrivateCA.new(now=now)
    secret = {"secret": secrets.token_hex(32).encode() + b"\n"}
    return write_files(folder, authority.files() | _files_of_all(authority, wanted, now) | secret)


def renew_files(folder: Path, wanted: Wanted) -> Sequence[Path]:
    """Make new certificates of the CA that is there; those in use go on being trusted.

    Raises:
        ConfigError: There is no usable CA.
    """
    now = datetime.datetime.now(datetime.UTC)
    return write_files(folder, _files_of_all(PrivateCA.load(folder), wanted, now))


def write_files(folder: Path, files: Mapping[str, bytes]) -> Sequence[Path]:
    """Write files that their owner alone can read, and return their paths.

    Raises:
        ConfigError: That is not possible.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in files.items():
            number, temporary = tempfile.mkstemp(dir=folder)  # with mode 0600
            with os.fdopen(number, "wb") as file:
                file.write(data)
            Path(temporary).replace(folder / name)
    except OSError as error:
        raise ConfigError("certs", f"{folder} cannot be written: {error.strerror}") from error
    return [folder / name for name in files]


def _files_of_all(authority: PrivateCA, wanted: Wanted, now: datetime.datetime) -> dict[str, bytes]:
    return {
        name: data for party in Party for name, data in authority.files_of(party, wanted, now=now).items()
    }


def _pem(key: CertificateIssuerPrivateKeyTypes) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _builder(
    *,
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    first: datetime.datetime,
    last: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(first)
        .not_valid_after(last)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ConfigError("--hosts", f"{host!r} is no address and no host name") from None
        return x509.DNSName(host)
