"""Keys and values that both ends of a pair see, whichever of them set them: how libraries find each other.

Whatever a library exchanges before it can talk by itself goes over the pair's own connection, so that no port
is opened for it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

from twinpool.core.errors import TransferDamaged, TransferError, TransferTimeout

_KEY_LENGTH = struct.Struct("<H")
_MOST_KEYS = 256
_MOST_VALUE_BYTES = 2**16


class KeyExchange:
    """One end's view.  For any thread.

    Args:
        send: Takes the message of a key to the other end's ``received``; called from any thread.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._values: dict[str, bytes] = {}
        self._error: TransferError | None = None
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Set a value at both ends."""
        self._keep(key, value)
        name = key.encode()
        self._send(_KEY_LENGTH.pack(len(name)) + name + value)

    def received(self, message: bytes) -> None:
        """Take note of what the other end has set.

        Raises:
            TransferDamaged: The message is none of a key, or one of too many or of too much.
        """
        end = _KEY_LENGTH.size + int.from_bytes(message[: _KEY_LENGTH.size], "little")
        if len(message) < end:
            raise TransferDamaged("the message of a key has none")
        if len(self._values) >= _MOST_KEYS:
            raise TransferDamaged(f"more than {_MOST_KEYS} keys")
        if len(message) - end > _MOST_VALUE_BYTES:
            raise TransferDamaged(f"a key of {len(message) - end} bytes")
        self._keep(message[_KEY_LENGTH.size : end].decode("utf-8", "replace"), message[end:])

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """Return a value, once either end has set it.

        Raises:
            TransferTimeout: Nobody has within ``timeout_s``.
            TransferError: What ``fail`` was told.
        """
        self.wait([key], timeout_s=timeout_s)
        return self._values[key]

    def wait(self, keys: Sequence[str], *, timeout_s: float) -> None:
        """Return once all keys are set; raises as ``get`` does."""
        with self._changed:
            self._changed.wait_for(lambda: self.has(keys) or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            if not self.has(keys):
                raise TransferTimeout(f"the peer did not say {', '.join(keys)} in {timeout_s:g} s")

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self._values for key in keys)

    def values(self) -> list[bytes]:
        """Return all values, in the order in which they were set here."""
        return list(self._values.values())

    def fail(self, error: TransferError) -> None:
        """Wake everybody who waits, or will: the other end is gone."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _keep(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
