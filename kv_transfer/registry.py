"""Finds transports by the names of their files."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from kv_transfer import transports
from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.transport import Transport
from twinpool.core.errors import ConfigError
from twinpool.core.tls import TLSFiles

# The best first; a name that is not here is used only if it is asked for.
PREFERENCE = ("shm", "tcp", "grpc")
_WITHIN_ONE_PROCESS = ("loopback",)


def transport_names() -> tuple[str, ...]:
    """Return the names of all transports that this build has, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(transports.__path__)))


def names_between_processes() -> tuple[str, ...]:
    """Return the names of those that reach another process, in alphabetical order."""
    return tuple(name for name in transport_names() if name not in _WITHIN_ONE_PROCESS)


def check_between_processes(names: Sequence[str]) -> None:
    """Check transports that somebody has named for workers that are processes.

    Raises:
        ConfigError: One does not exist, or reaches no other process.
    """
    for name in names:
        if name in _WITHIN_ONE_PROCESS:
            raise ConfigError(
                "transfer.transports", f"{name} reaches no other process, as every worker is one"
            )
        _check_exists(name)


def unavailable(name: str) -> str:
    """Return why this machine cannot use a transport; empty if it can.

    Raises:
        ConfigError: There is no such transport.
    """
    reason: str = _module(name).unavailable()
    return reason


def chosen_transports(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a worker's process uses, best first: those named, or all in ``PREFERENCE`` that work here.

    Raises:
        ConfigError: As ``check_between_processes``, or one that was named does not work here.
    """
    check_between_processes(names)
    for name in names:
        reason = unavailable(name)
        if reason:
            raise ConfigError("transfer.transports", f"{name} cannot be used here: {reason}")
    return names or tuple(name for name in PREFERENCE if name in transport_names() and not unavailable(name))


def load_transport(
    name: str, config: TransferConfig, hub: Hub | None = None, tls: TLSFiles | None = None
) -> Transport:
    """Create the transport in ``kv_transfer/transports/<name>.py``.

    Call it on the event loop that will use the transport.

    Args:
        name: Of the file.
        config: Where to listen, and limits.
        hub: Where workers of one process find each other; None is one with nobody else in it.
        tls: Of this process; None where peers speak in clear.

    Raises:
        ConfigError: There is no such file, or the transport cannot listen where it should.
    """
    transport: Transport = _module(name).create(config, hub or Hub(), tls)
    return transport


def _module(name: str) -> ModuleType:
    _check_exists(name)
    return import_module(f"{transports.__name__}.{name}")


def _check_exists(name: str) -> None:
    if name not in transport_names():
        raise ConfigError("transfer.transports", f"{name} is none of {', '.join(transport_names())}")
