"""Limits and addresses of the HTTP side; it knows no route and no model."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPConfig:
    """Where the HTTP server listens and what it accepts from one client."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    api_key: str | None = None  # when set, every route but /health and /ready asks for it
    max_body_bytes: int = 8 * 1024 * 1024
    max_header_bytes: int = 16 * 1024  # request line and all header lines together
    header_timeout_s: float = 10.0  # from the first byte of a request to the end of its headers
    body_timeout_s: float = 30.0  # from the end of the headers to the end of the body
    write_timeout_s: float = 60.0  # a client that reads nothing for so long is given up
    keep_alive_s: float = 75.0  # an idle connection is closed after this long
    stop_timeout_s: float = 30.0  # how long open answers may go on once the server stops

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("http.port", f"{self.port} is not in [0, 65535]")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("http.api_key", "only printable ASCII can be sent in a header")
        if self.api_key == "":
            raise ConfigError("http.api_key", "an empty key would let everybody in")
        for name in ("max_body_bytes", "max_header_bytes"):
            if getattr(self, name) < 1024:
                raise ConfigError(f"http.{name}", f"{getattr(self, name)} is less than 1024")
        for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_s"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"http.{name}", f"{getattr(self, name)} is not a positive number of seconds"
                )
        if not 0.0 <= self.stop_timeout_s < float("inf"):
            raise ConfigError("http.stop_timeout_s", f"{self.stop_timeout_s} is not a number of seconds")
