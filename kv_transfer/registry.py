"""Finds transports by the names of their files."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from kv_transfer import transports
from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.transport import Transport
from twinpool.core.errors import ConfigError


def transport_names() -> tuple[str, ...]:
    """Return the names of all transports that this build has, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(transports.__path__)))


def load_transport(name: str, config: TransferConfig, hub: Hub | None = None) -> Transport:
    """Create the transport in ``kv_transfer/transports/<name>.py``.

    Call it on the event loop that will use the transport.

    Args:
        name: Of the file.
        config: Where to listen, and limits.
        hub: Where workers of one process find each other; None is one with nobody else in it.

    Raises:
        ConfigError: There is no such file, or the transport cannot listen where it should.
    """
    if name not in transport_names():
        raise ConfigError("transfer.transport", f"{name} is none of {', '.join(transport_names())}")
    transport: Transport = import_module(f"{transports.__name__}.{name}").create(config, hub or Hub())
    return transport
