"""Logging of what strangers can make happen as often as they like; knows nothing of what it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_EVERY_S = 10.0


class SeldomLog:
    """Writes a line at once, and then one in ``_EVERY_S`` with the number of those that were left out.

    Args:
        log: Where lines go.
        level: Of them.
        now_s: A clock that never goes back.
    """

    def __init__(
        self, log: logging.Logger, level: int = logging.INFO, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._level = level
        self._now_s = now_s
        self._told_s = float("-inf")
        self._num_untold = 0

    def tell(self, what: str, *about: object) -> None:
        """Log ``what % about``, unless something was logged here a moment ago."""
        now_s = self._now_s()
        if now_s - self._told_s < _EVERY_S:
            self._num_untold += 1
            return
        if self._num_untold:
            what, about = f"{what} (and %d more like it before)", (*about, self._num_untold)
        self._log.log(self._level, what, *about)
        self._told_s, self._num_untold = now_s, 0
