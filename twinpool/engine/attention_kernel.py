"""What an attention kernel is, and how one is found: the file of its name in twinpool/engine/attention.

Shapes: T tokens in the batch, S slots of the cache, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

from torch import Tensor

from twinpool.core.errors import ConfigError
from twinpool.engine import attention
from twinpool.engine.batch import Batch


class PreparedAttention(Protocol):
    """Attention of one batch under one window, ready to run in every layer."""

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        """Return [T, H x D]: each token's view of its own sequence up to itself.

        Args:
            q_THD: Rotated queries.
            k_TKD: Rotated keys of the batch's own tokens; the cache holds them already.
            v_TKD: Their values.
            cache: Keys and values of the layer, [S, K, D] each.
        """
        ...


class AttentionKernel(Protocol):
    """A way to compute attention over the paged cache."""

    def prepare(self, batch: Batch, *, window: int | None) -> PreparedAttention:
        """Do once what all layers of one window share.

        Args:
            batch: The step's tokens.
            window: How many tokens a token sees, itself included; None is all before it.
        """
        ...


def attention_kernel(name: str, *, num_kv_heads: int) -> AttentionKernel:
    """Make the kernel of the file ``twinpool/engine/attention/<name>.py``.

    Raises:
        ConfigError: There is no such file; the message lists those that are.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(attention.__path__))
    if name not in known:
        raise ConfigError("engine.attention", f"{name!r} is none of {', '.join(known)}")
    module = importlib.import_module(f"{attention.__name__}.{name}")
    kernel: AttentionKernel = module.create(num_kv_heads=num_kv_heads)
    return kernel
