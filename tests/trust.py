"""Parties that prove nothing, for tests about something else, and parties that prove all."""

from __future__ import annotations

from pathlib import Path

from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.tls import Party, TLSFiles
from twinpool.rpc.door import Door
from twinpool.rpc.token import REGISTRY

ROUTER, WORKER = Trust(party=Party.ROUTER), Trust(party=Party.WORKER)


def worker_door(trust: Trust = WORKER, *, worker_id: str = "decode-0") -> Door:
    """Return the door of a worker, which the router may pass."""
    return Door(trust, callers=Party.ROUTER, audience=worker_id)


def registry_door(trust: Trust = ROUTER) -> Door:
    """Return the door of a router, which workers may pass."""
    return Door(trust, callers=Party.WORKER, audience=REGISTRY)


def tls_files(folder: Path, party: Party) -> TLSFiles:
    """Return what ``make_files`` wrote into ``folder`` for one party."""
    return TLSFiles.read(
        cert_file=folder / f"{party}.pem", key_file=folder / f"{party}.key", ca_file=folder / "ca.pem"
    )


def trust_of(folder: Path, party: Party, *, secret: Secret | None = None) -> Trust:
    """Return a party with the certificates and the secret of ``folder``, or with another secret."""
    secret = Secret.from_file(folder / "secret") if secret is None else secret
    return Trust(party=party, secret=secret, tls=tls_files(folder, party))
