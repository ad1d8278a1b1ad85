"""Small files that settings name, read whole at the start of a process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from twinpool.core.errors import ConfigError

MAX_BYTES = 2**20  # a larger one, or a device without end, was named by mistake


def read_file(field: str, path: Path) -> bytes:
    """Return what is in a file.

    Args:
        field: The setting that names it.
        path: Of the file.

    Raises:
        ConfigError: It cannot be read, or is far too large.
    """
    return _read(field, path)[0]


def read_private_file(field: str, path: Path) -> bytes:
    """As ``read_file``, of a file that only its owner and group may read.

    Raises:
        ConfigError: Others may, too.
    """
    data, mode = _read(field, path)
    if mode & stat.S_IROTH:
        raise ConfigError(field, f"{path} can be read by everybody (chmod o-r)")
    return data


def _read(field: str, path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            data, mode = file.read(MAX_BYTES + 1), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(field, f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(field, f"{path} is larger than {MAX_BYTES} bytes")
    return data, mode
