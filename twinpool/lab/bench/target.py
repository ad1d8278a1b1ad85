"""Where requests go: address and headers of one server."""

from __future__ import annotations

import ssl
import urllib.parse
from dataclasses import dataclass, field

from twinpool.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One server.

    Args:
        host: Name or address.
        port: Of HTTP.
        prefix: Before every path, as ``/api``; empty at most servers.
        tls: For https; None for http.
        headers: Lines that every request has, ended; it may hold a key, so it is never shown.
    """

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None
    headers: bytes = field(repr=False)

    def request(self, method: str, path: str, body: bytes = b"", *, request_id: str = "") -> bytes:
        """Return a whole request as it goes over the wire."""
        lines = f"{method} {self.prefix}{path} HTTP/1.1\r\n".encode() + self.headers
        if request_id:
            lines += f"x-request-id: {request_id}\r\n".encode()
        if method == "POST":
            lines += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n".encode()
        return lines + b"\r\n" + body


def read_target(url: str, *, api_key: str | None) -> Target:
    """Read ``http://HOST:PORT``, with or without a ``/v1`` at its end.

    Raises:
        ConfigError: It is no such URL, one with a password, or the key has a character that no
            header can hold.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if "@" in url.partition("?")[0]:  # it is not shown: a password may be in it
        raise ConfigError("bench.url", "has a name or a password before the host; a key goes with --api-key")
    if not host or parts.scheme not in ("http", "https") or not url.isascii():
        raise ConfigError("bench.url", f"{url!r} does not begin with http://HOST:PORT")
    is_tls = parts.scheme == "https"
    shown = f"[{host}]" if ":" in host else host
    lines = [f"host: {shown}:{port}" if port else f"host: {shown}", "accept: */*"]
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("bench.api_key", "has a character that no header can hold")
        lines.append(f"authorization: Bearer {api_key}")
    return Target(
        host=host,
        port=port or (443 if is_tls else 80),
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        tls=ssl.create_default_context() if is_tls else None,
        headers="".join(f"{line}\r\n" for line in lines).encode(),
    )
