"""Why a worker's process cannot run, in words that people understand."""

from __future__ import annotations

import torch

from twinpool.core.errors import ServingError


def describe_failure(error: BaseException) -> str | None:
    """Return why a worker cannot run, in one line, if it is a reason that people understand."""
    if isinstance(error, ServingError):
        return str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        return f"out of memory: {str(error).splitlines()[0] if str(error) else 'MemoryError'}"
    return None
