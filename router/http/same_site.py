"""Whether a request comes from a page that somebody else wrote, in the browser of somebody who may ask.

Without an API key whoever reaches the port may ask anything; on a loopback port that is meant to be the
people and programs of this machine, and a browser on it runs the pages of strangers.  Such a page can send
requests here (its ``Origin`` says whose it is), or have its own name point here (``Host`` says that name).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import Scope


def foreign_page(scope: Scope, *, host: str) -> str | None:
    """Return what shows that a request is a foreign page's; None if nothing does.

    Args:
        scope: Of the request.
        host: That the server listens on.
    """
    asked = _header(scope, b"host")
    origin = _header(scope, b"origin")
    if origin is not None and _split(origin)[0] != asked:
        return f"origin {origin[:100]}"
    if asked is not None and _is_loopback(host) and not _is_loopback(_split(f"//{asked}")[1]):
        return f"host {asked[:100]}"
    return None


def _split(url: str) -> tuple[str, str]:
    """Return host and port, and the host alone; empty if there are none to be found."""
    try:
        parts = urlsplit(url)
        return parts.netloc, parts.hostname or ""
    except ValueError:
        return "", ""


def _header(scope: Scope, name: bytes) -> str | None:
    for each, value in scope["headers"]:
        if each == name:
            text: str = value.decode("latin-1")
            return text
    return None


def _is_loopback(host: str) -> bool:
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
