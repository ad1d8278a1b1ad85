"""What a routing policy sees and says: plain values, no I/O and no clock, so a simulator can run it too."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from twinpool.core.errors import ConfigError
from twinpool.core.request import Request


class WorkerView(NamedTuple):
    """One ready worker at the moment of a choice."""

    worker_id: str
    in_flight: int  # requests this router has given it and that have not ended
    limit: int  # most requests this router gives it at once
    in_flight_tokens: int  # prompt and earlier output of those requests
    free_blocks: int  # as the last heartbeat said, less what was given to it since
    num_blocks: int
    block_tokens: int
    max_request_tokens: int

    def has_room(self, request: Request) -> bool:
        """Return whether the worker can start ``request`` about now.

        An idle worker is always worth asking: its own refusal is better informed than a number
        that is a heartbeat old.
        """
        num_tokens = request.num_tokens + 1
        if self.in_flight >= self.limit or num_tokens > self.max_request_tokens:
            return False
        return self.in_flight == 0 or num_tokens <= self.free_blocks * self.block_tokens


class Snapshot(NamedTuple):
    """The ready workers, full or not, in the order in which they joined."""

    prefill: tuple[WorkerView, ...] = ()
    decode: tuple[WorkerView, ...] = ()
    colocated: tuple[WorkerView, ...] = ()
    is_local_allowed: bool = True  # decode workers may compute prompts while there is no prefill worker


class Placement(NamedTuple):
    """Where one attempt runs; at least one worker is named.

    Without a prefill worker the decode worker computes the prompt too.  Without a decode worker the
    answer is the first token alone.
    """

    decode: str | None
    prefill: str | None = None


class RoutingPolicy(Protocol):
    """Chooses workers.

    ``choose`` is called again whenever something changed while a request waits.  It may remember
    its own choices to spread the next ones; it changes nothing else.
    """

    def choose(self, request: Request, snapshot: Snapshot) -> Placement | None:
        """Return a placement on workers that have room, or None if the request should wait."""
        ...


Pick = Callable[[Sequence[WorkerView]], WorkerView]
"""Chooses one of several workers of one kind, never of none."""


class Turns:
    """Remembers who was picked how long ago, so that workers that are otherwise equal take turns."""

    def __init__(self) -> None:
        self._picks = 0
        self._picked: dict[str, int] = {}  # worker id -> number of its last pick

    def pick(self, workers: Sequence[WorkerView], *, key: Callable[[WorkerView], float]) -> WorkerView:
        """Return the worker with the smallest ``key``; of several, the one picked longest ago."""
        chosen = min(workers, key=lambda worker: (key(worker), self._picked.get(worker.worker_id, 0)))
        self._picks += 1
        self._picked[chosen.worker_id] = self._picks
        return chosen


def place(request: Request, snapshot: Snapshot, *, pick: Pick) -> Placement | None:
    """Return a placement that keeps prefill and decode apart where it can, with ``pick`` for each kind."""
    prefill = [worker for worker in snapshot.prefill if worker.has_room(request)]
    decode = [worker for worker in snapshot.decode if worker.has_room(request)]
    colocated = [worker for worker in snapshot.colocated if worker.has_room(request)]
    if prefill and needs_one_token(request):
        return Placement(decode=None, prefill=pick(prefill).worker_id)
    if prefill and decode:
        chosen = pick(decode + colocated)
        if chosen in colocated:
            return Placement(decode=chosen.worker_id)
        return Placement(decode=chosen.worker_id, prefill=pick(prefill).worker_id)
    is_local = snapshot.is_local_allowed and not snapshot.prefill
    alone = decode + colocated if is_local else colocated
    return Placement(decode=pick(alone).worker_id) if alone else None


def needs_one_token(request: Request) -> bool:
    """Return whether the next token is the last one, so that nothing has to be decoded."""
    return request.sampling.max_tokens - len(request.output_ids) == 1


class PolicyModule(Protocol):
    """A file in router/policies."""

    def create(self) -> RoutingPolicy: ...


def load_policy(name: str) -> RoutingPolicy:
    """Build the policy whose file in ``router/policies`` is called ``name``.

    Raises:
        ConfigError: There is no such file.
    """
    import router.policies

    known = sorted(module.name for module in pkgutil.iter_modules(router.policies.__path__))
    if name not in known:
        raise ConfigError("router.policy", f"{name} is none of {', '.join(known)}")
    return cast(PolicyModule, importlib.import_module(f"router.policies.{name}")).create()
