"""The deployment around a router, as operators see it: which workers are wanted, and how to change that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from router.roles import RoleChange
from twinpool.core.errors import InvalidRequest
from twinpool.core.ports import Role


class Deployment(Protocol):
    """Somebody who starts and ends workers."""

    def describe(self) -> Mapping[str, object]:
        """Tell of the workers that are wanted, those without a place included, as JSON values."""
        ...

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Want so many workers of each role that is named; surplus ones drain, the highest number first.

        Raises:
            InvalidRequest: The deployment could not answer then, or has no such pool.
        """
        ...

    async def replace(self, worker_id: str) -> None:
        """Drain a worker and start another life of it.

        Raises:
            InvalidRequest: No such worker is wanted.
        """
        ...

    async def assigned(self, change: RoleChange) -> None:
        """Take note of a worker's new role: pools have other sizes now, and its next life has that role."""
        ...


class StartedElsewhere:
    """Workers that come and go by other hands.

    Args:
        security: What keeps strangers from joining them.
        settings: What may be told of the server's own.
    """

    def __init__(self, *, security: str = "nothing", settings: Mapping[str, object] | None = None) -> None:
        self._security = security
        self._settings = settings or {}

    def describe(self) -> Mapping[str, object]:
        return {
            "workers": [],
            "ray": "not used",
            "security": self._security,
            "settings": self._settings,
        }

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        raise InvalidRequest(None, "the workers of this deployment are started and ended elsewhere")

    async def replace(self, worker_id: str) -> None:
        raise InvalidRequest("worker", f"{worker_id} was started elsewhere and is replaced there")

    async def assigned(self, change: RoleChange) -> None:
        return  # whoever starts its next life says which role that has
