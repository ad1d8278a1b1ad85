"""Where the workers of one process find each other; knows nothing of what they exchange."""

from __future__ import annotations

import itertools
from typing import Any


class Hub:
    """A table from addresses to the transports that listen there.

    Workers reach each other only if they were given the same hub.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, Any] = {}
        self._numbers = itertools.count()

    def new_address(self) -> str:
        """Return a name that no listener of this hub has had."""
        return f"worker-{next(self._numbers)}"

    def listen(self, address: str, listener: object) -> None:
        """Make ``listener`` reachable; the address must be free."""
        assert address not in self._listeners, f"{address} is taken"
        self._listeners[address] = listener

    def leave(self, address: str, listener: object) -> None:
        """Forget ``listener``; does nothing if it is not the one at ``address``."""
        if self._listeners.get(address) is listener:
            del self._listeners[address]

    def find(self, address: str) -> Any | None:
        """Return who listens at ``address``, or None."""
        return self._listeners.get(address)
