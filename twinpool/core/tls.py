"""Who a process is by its certificate, and whom it expects at the other end.

A certificate names a party, `router.twinpool` or `worker.twinpool`, and not a host: a worker that moves keeps
its certificate, and nobody who has a worker's can pose as the router.  Both ends of a connection show one and
both must be signed by the CA of the deployment.  Knows no gRPC and no configuration.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from twinpool.core.errors import Untrusted
from twinpool.core.files import read_file, read_private_file

PARTY_DOMAIN = "twinpool"


class Party(StrEnum):
    """Whom a certificate speaks for."""

    ROUTER = "router"
    WORKER = "worker"

    @property
    def dns_name(self) -> str:
        """The name in its certificates, which clients expect in place of a host name."""
        return f"{self.value}.{PARTY_DOMAIN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSFiles:
    """The certificate of one process, its private key and the CA of its peers: PEM, as read at its start."""

    cert_file: Path
    key_file: Path
    ca_file: Path
    cert: bytes = field(repr=False)  # with the certificates between it and the CA, if there are any
    key: bytes = field(repr=False)  # without a password
    ca: bytes = field(repr=False)

    @classmethod
    def read(cls, *, cert_file: Path, key_file: Path, ca_file: Path) -> TLSFiles:
        """Read the files; what is in them is not looked at.

        Raises:
            ConfigError: One cannot be read, or the key can be read by everybody.
        """
        return cls(
            cert_file=cert_file,
            key_file=key_file,
            ca_file=ca_file,
            cert=read_file("security.tls_cert", cert_file),
            key=read_private_file("security.tls_key", key_file),
            ca=read_file("security.tls_ca", ca_file),
        )

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a socket that listens: a client without a certificate of our CA is refused.

        Call ``check_peer`` once the handshake is over: the context does not know which party may call.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._with_files(context)

    def client_context(self) -> ssl.SSLContext:
        """Return the context of a socket that connects; ``server_hostname`` is a party's ``dns_name``."""
        return self._with_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _with_files(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.cert_file, self.key_file)
        context.load_verify_locations(cadata=self.ca.decode("ascii"))
        return context


def check_peer(names: Iterable[str | bytes], expected: Party) -> None:
    """Check that a peer's certificate, which our CA signed, speaks for ``expected``.

    Args:
        names: The DNS names in it.  Of a socket ``names_in`` finds them; of a gRPC call they are the
            ``x509_subject_alternative_name`` of ``auth_context()``.
        expected: Who may be there.

    Raises:
        Untrusted: It does not.
    """
    found = sorted(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names)
    if expected.dns_name not in found:
        raise Untrusted(
            "security.tls_cert",
            f"the peer's certificate is for {', '.join(found) or 'nobody'}, not for {expected.dns_name}",
        )


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the DNS names in what ``SSLObject.getpeercert()`` gave; none if there was no certificate."""
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(str(value) for kind, value in names if kind == "DNS")
