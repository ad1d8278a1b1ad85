"""What the processes of one deployment share and nobody else knows, and what it proves."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from twinpool.core.errors import ConfigError
from twinpool.core.files import read_private_file

_LEAST_BYTES = 16
_MOST_BYTES = 4096


class Secret:
    """Signs what one process says to another.

    Args:
        key: Of at least 16 bytes; empty where nobody needs to prove anything (`is_set` is false then).

    Raises:
        ConfigError: The key is too short to protect anything.
    """

    def __init__(self, key: bytes = b"") -> None:
        if key and len(key) < _LEAST_BYTES:
            raise ConfigError("security.secret", f"{len(key)} bytes are less than {_LEAST_BYTES}")
        self._key = key

    @classmethod
    def random(cls) -> Secret:
        """Make a new one."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_file(cls, path: Path) -> Secret:
        """Read one; white space around it does not count.

        Raises:
            ConfigError: The file cannot be read, is readable by others than its owner and group, or is too
                short or too long.
        """
        key = read_private_file("security.secret_file", path).strip()
        if not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
            raise ConfigError(
                "security.secret_file",
                f"{path} holds {len(key)} bytes, needed are {_LEAST_BYTES} to {_MOST_BYTES}",
            )
        return cls(key)

    @property
    def is_set(self) -> bool:
        """Whether there is anything that others do not know."""
        return bool(self._key)

    @property
    def key(self) -> bytes:
        """The secret itself, to be handed to a process of the same deployment."""
        return self._key

    def __repr__(self) -> str:
        return "Secret(set)" if self.is_set else "Secret(not set)"

    def sign(self, purpose: str, *fields: str | int | float | bytes) -> bytes:
        """Return HMAC-SHA256 over the purpose and the fields; no two lists of fields are signed alike."""
        return sign(self._key, purpose, *fields)

    def is_signed(self, signature: bytes, purpose: str, *fields: str | int | float | bytes) -> bool:
        """Return whether ``signature`` is the one of ``sign``; takes as long for every wrong one."""
        return hmac.compare_digest(signature, self.sign(purpose, *fields))


def sign(key: bytes, purpose: str, *fields: str | int | float | bytes) -> bytes:
    """Return HMAC-SHA256 of ``key`` over typed fields, each with its length."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for field in (purpose, *fields):
        data = field if isinstance(field, bytes) else repr(field).encode()
        mac.update(f"{type(field).__name__}:{len(data)}:".encode() + data)
    return mac.digest()
