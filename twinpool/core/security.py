"""Who may talk to whom in a deployment: the settings, and what a process holds of them while it runs.

A shared secret proves that a caller belongs to the deployment; certificates prove which party it is and keep
others from listening.  With neither, every address must be one of this machine alone.
"""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass, field
from pathlib import Path

from twinpool.core.certificates import check_files
from twinpool.core.errors import ConfigError
from twinpool.core.secret import Secret
from twinpool.core.tls import Party, TLSFiles

_WARN_DAYS = 14

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Where a process finds what proves who it is."""

    secret_file: Path | None = (
        None  # the same bytes for every process; null: `serve` makes one for its workers
    )
    tls_cert: Path | None = None  # PEM; names router.twinpool or worker.twinpool
    tls_key: Path | None = None
    tls_ca: Path | None = None  # signed the certificate of every process
    insecure: bool = False  # listen beyond this machine without both of them

    def __post_init__(self) -> None:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        missing = [name for name, path in files.items() if path is None]
        if 0 < len(missing) < len(files):
            raise ConfigError(
                f"security.{missing[0]}", "is missing: tls_cert, tls_key and tls_ca go together"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What one process shows to its peers and asks of them."""

    party: Party  # which this process is
    secret: Secret = field(default_factory=Secret)
    tls: TLSFiles | None = None
    insecure: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether a stranger who reaches a port can neither be served nor listen."""
        return self.secret.is_set and self.tls is not None

    def describe(self) -> str:
        """Say in a few words what keeps strangers out."""
        names = (("secret", self.secret.is_set), ("certificates", self.tls is not None))
        there = " and ".join(name for name, is_there in names if is_there) or "nothing"
        return f"{there}, INSECURE" if self.insecure and not self.is_closed else there


def load_trust(config: SecurityConfig, *, party: Party, secret: Secret | None = None) -> Trust:
    """Read the files and check them.

    Args:
        config: Where they are.
        party: Which this process is.
        secret: Was handed over by whoever started this process; goes before ``secret_file``.

    Raises:
        ConfigError: A file is missing, readable by everybody, out of date, or does not fit the others.
    """
    if secret is None:
        secret = Secret() if config.secret_file is None else Secret.from_file(config.secret_file)
    tls = None
    if config.tls_cert is not None and config.tls_key is not None and config.tls_ca is not None:
        tls = TLSFiles.read(cert_file=config.tls_cert, key_file=config.tls_key, ca_file=config.tls_ca)
        left = check_files(tls, party) - datetime.datetime.now(datetime.UTC)
        if left.days < _WARN_DAYS:
            _log.warning("security: a certificate expires in %.1f days", left.total_seconds() / 86400)
    return Trust(party=party, secret=secret, tls=tls, insecure=config.insecure)
