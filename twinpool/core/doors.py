"""Which addresses may be listened on: this machine's own, or any if strangers are kept out."""

from __future__ import annotations

import ipaddress
import logging
import socket

from twinpool.core.errors import ConfigError
from twinpool.core.security import Trust

_log = logging.getLogger(__name__)


def check_door(field: str, host: str, trust: Trust) -> None:
    """Check that listening on ``host`` lets no stranger in; warns where that was given up on purpose.

    Args:
        field: The setting that names the host.
        host: An address, a name, or a wildcard.
        trust: Of the process that listens.

    Raises:
        ConfigError: Others can reach it and certificates or a secret are missing, or there is no such host.
    """
    if is_loopback(field, host) or trust.is_closed:
        return
    missing = " and ".join(
        name
        for name, is_there in (
            ("certificates (tls_cert, tls_key, tls_ca)", trust.tls is not None),
            ("a shared secret (secret_file)", trust.secret.is_set),
        )
        if not is_there
    )
    if not trust.insecure:
        raise ConfigError(
            field,
            f"{host} can be reached from other machines, which needs {missing}; --insecure goes without",
        )
    _log.warning("insecure: %s %s can be reached from other machines, without %s", field, host, missing)


def is_loopback(field: str, host: str) -> bool:
    """Whether ``host`` stands for addresses of this machine alone, all of them.

    Raises:
        ConfigError: It is unknown.
    """
    if host == "":  # every address there is
        return False
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(field, f"{host} cannot be resolved: {error}") from error
    return all(_is_loopback(str(address[0])) for *_, address in found)


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
