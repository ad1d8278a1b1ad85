"""Find a scheduler policy by its name: the name is a file in ``twinpool/engine/policies``."""

from __future__ import annotations

import importlib
import pkgutil

from twinpool.core.errors import ConfigError
from twinpool.engine import policies
from twinpool.engine.plan import SchedulerPolicy


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(policies.__path__)))


def load_policy(name: str) -> SchedulerPolicy:
    """Build the policy of that name.

    Raises:
        ConfigError: There is none.
    """
    names = policy_names()
    if name not in names:
        raise ConfigError("engine.policy", f"{name} is none of {', '.join(names)}")
    module = importlib.import_module(f"{policies.__name__}.{name}")
    policy: SchedulerPolicy = module.create()
    return policy
