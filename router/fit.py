"""Which workers may serve one model together: a rule over what two of them say of themselves.

Every pair of members is checked when the second one joins, so no request ever meets a pair that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from twinpool.core.errors import ConfigError, LayoutMismatch
from twinpool.core.layout import KVLayout
from twinpool.core.ports import Role, WorkerInfo

OWN = frozenset({"tp_size", "block_tokens", "convert_dtypes"})
"""What each worker decides for itself: KV travels by token position and by head, whatever holds it there."""


def check_fit(there: WorkerInfo, new: WorkerInfo) -> None:
    """Check that two workers can serve one model together.

    Model, layout and fingerprint must be equal but for OWN, and for the dtype where both convert.  Who
    computes prompts and who decodes must have a transport in common.

    Raises:
        LayoutMismatch: They differ in a setting that must be equal; the first such setting is named.
    """
    for name, old_value, new_value in _settings(there, new):
        is_free = name in OWN or (name == "dtype" and _converts(there) and _converts(new))
        if old_value != new_value and not is_free:
            raise LayoutMismatch(
                f"{name}: {there.worker_id} stores {old_value}, {new.worker_id} stores {new_value}"
            )
    if {there.role, new.role} == {Role.PREFILL, Role.DECODE}:
        old_names, new_names = _transports(there), _transports(new)
        if old_names and new_names and not old_names & new_names:
            raise LayoutMismatch(
                f"transports: {there.worker_id} has {', '.join(sorted(old_names))}, "
                f"{new.worker_id} has {', '.join(sorted(new_names))}, and none in common"
            )


def check_ranks(info: WorkerInfo) -> None:
    """Check that a worker says of each of its ranks how KV reaches it.

    Raises:
        ConfigError: It names more ranks than it has, or fewer.
    """
    if len(info.ranks) != info.layout.tp_size:
        raise ConfigError(
            f"worker {info.worker_id}", f"{len(info.ranks)} ranks are named, tp_size is {info.layout.tp_size}"
        )


def _transports(info: WorkerInfo) -> set[str]:
    return {endpoint.transport for endpoints in info.ranks for endpoint in endpoints}


def _converts(info: WorkerInfo) -> bool:
    return info.fingerprint.get("convert_dtypes") == "true"


def _settings(there: WorkerInfo, new: WorkerInfo) -> Iterable[tuple[str, object, object]]:
    yield "model", there.model, new.model
    for each in fields(KVLayout):
        yield each.name, getattr(there.layout, each.name), getattr(new.layout, each.name)
    for name in sorted({*there.fingerprint, *new.fingerprint}):
        yield name, there.fingerprint.get(name, "nothing"), new.fingerprint.get(name, "nothing")
