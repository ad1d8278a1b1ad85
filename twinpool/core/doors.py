"""Which addresses may be listened on and called: this machine's own, or any if strangers are kept out."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket

from twinpool.core.errors import ConfigError
from twinpool.core.security import Trust

# A name or an IPv4 address, or an IPv6 address in brackets.
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9]+)?\]):([0-9]{1,5})", re.ASCII)

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


def check_peer_address(field: str, address: str, trust: Trust) -> None:
    """Check where a peer says it can be reached, before anybody calls there.

    Without certificates and a secret a whole deployment is on one machine, and an address elsewhere is an
    attempt to have us call there.

    Args:
        field: What the peer calls it.
        address: HOST:PORT; no path, no list, no name that is to be resolved in some other way.
        trust: Of the process that would call.

    Raises:
        ConfigError: It is no such address, or not one of this machine although all must be.
    """
    host = host_of(field, address)
    if not (trust.is_closed or trust.insecure or host == "localhost" or _is_loopback(host)):
        raise ConfigError(field, f"{address} is not on this machine, which needs certificates and a secret")


def host_of(field: str, address: str) -> str:
    """Return the host of HOST:PORT.

    Raises:
        ConfigError: It is no such address.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) <= 65535:
        raise ConfigError(field, f"{address[:100]!r} is not HOST:PORT")
    return match[1].strip("[]")


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
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:  # a name
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
