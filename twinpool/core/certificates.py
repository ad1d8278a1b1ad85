"""Whether the certificate, key and CA of a process fit together, told at its start and not at its first call.

Loads `cryptography` when called: nobody without certificates pays for it.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinpool.core.errors import ConfigError, Untrusted
from twinpool.core.tls import Party, TLSFiles, check_peer

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

CERT, KEY, CA = "security.tls_cert", "security.tls_key", "security.tls_ca"


def check_files(files: TLSFiles, party: Party, *, now: datetime.datetime | None = None) -> datetime.datetime:
    """Check what peers would refuse later.

    Args:
        files: Of this process.
        party: Which it is.
        now: With a time zone; the present time if left out.

    Returns:
        When the first of the certificates expires.

    Raises:
        ConfigError: The field is the setting whose file is wrong.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    chain, authorities = _certificates(CERT, files.cert), _certificates(CA, files.ca)
    leaf = chain[0]
    _check_key(files.key, leaf)
    path = _path_to_authority(chain, authorities, files)
    for certificate in path:
        _check_time(CA if certificate in authorities else CERT, certificate, now)
    try:
        check_peer(_dns_names(leaf), party)
    except Untrusted as error:
        raise ConfigError(CERT, error.problem.replace("the peer's", "its")) from None
    _check_usage(leaf)
    return min(certificate.not_valid_after_utc for certificate in path)


def _certificates(field: str, pem: bytes) -> Sequence[Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(field, f"the file holds no certificate in PEM: {error}") from error


def _check_key(pem: bytes, leaf: Certificate) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
    )

    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise ConfigError(KEY, "the key is locked with a password") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(KEY, "the file holds no private key in PEM") from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise ConfigError(KEY, "the key does not belong to the certificate of tls_cert")


def _path_to_authority(
    chain: Sequence[Certificate], authorities: Sequence[Certificate], files: TLSFiles
) -> Sequence[Certificate]:
    """Return the certificates from the first of ``chain`` to the authority that vouches for it."""
    path = [chain[0]]
    while (authority := _issuer(path[-1], authorities)) is None:
        between = _issuer(path[-1], [other for other in chain[1:] if other not in path])
        if between is None:
            raise ConfigError(CA, f"{files.ca_file} did not sign the certificate in {files.cert_file}")
        path.append(between)
    return [*path, authority]


def _issuer(certificate: Certificate, candidates: Sequence[Certificate]) -> Certificate | None:
    from cryptography.exceptions import InvalidSignature

    for candidate in candidates:
        try:
            certificate.verify_directly_issued_by(candidate)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return candidate
    return None


def _check_time(field: str, certificate: Certificate, now: datetime.datetime) -> None:
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    name = certificate.subject.rfc4514_string()
    if now < first:
        raise ConfigError(field, f"{name} is not valid before {first:%Y-%m-%d %H:%M} UTC")
    if now > last:
        raise ConfigError(field, f"{name} expired on {last:%Y-%m-%d %H:%M} UTC")


def _dns_names(certificate: Certificate) -> Sequence[str]:
    from cryptography import x509

    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return extension.value.get_values_for_type(x509.DNSName)


def _check_usage(leaf: Certificate) -> None:
    """Every process both calls and is called; a certificate made for one of them fails half of the time."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        usage = set(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return
    for needed, word in (
        (ExtendedKeyUsageOID.SERVER_AUTH, "servers"),
        (ExtendedKeyUsageOID.CLIENT_AUTH, "clients"),
    ):
        if needed not in usage and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in usage:
            raise ConfigError(CERT, f"its extended key usage leaves out {word}; every process is both")
