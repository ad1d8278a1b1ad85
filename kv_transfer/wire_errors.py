"""How a receiver tells a sender what ended a transfer: by the name of the error's class."""

from __future__ import annotations

from twinpool.core import errors
from twinpool.core.errors import TransferError

_KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TransferError)
}


def error_named(name: str, message: str) -> TransferError:
    """Return the error of a class name; one that nobody knows is a plain TransferError."""
    return _KINDS.get(name, TransferError)(message)
