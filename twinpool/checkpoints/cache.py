"""Folders that are made once and then only read: where they live, and how they appear all at once.

A folder is built under a hidden name beside its place and renamed into it, so whatever carries the
final name is whole.  It does not know what is built.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from twinpool.core.errors import ModelError


def user_cache_dir() -> Path:
    """Return where converted models are kept: ``$TWINPOOL_CACHE``, or ``twinpool`` in the user's cache."""
    own = os.environ.get("TWINPOOL_CACHE")
    if own:
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "twinpool"


def build_once(target: Path, build: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """Return ``target``, built by ``build`` in an empty folder if it does not exist.

    Several processes may call this at once: one builds, the others wait for it.  If the builder is
    killed, the next one starts from nothing.

    Raises:
        ModelError: The cache cannot be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), progress):
            if not target.is_dir():
                _build(target, build)
    except OSError as error:
        raise ModelError("--model", f"cannot write {target}: {error}") from error
    return target


def _build(target: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{target.name}.part-"
    for left_over in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        build(part)
        for path in part.iterdir():
            path.chmod(0o644)
            _sync(path)
        part.chmod(0o755)
        part.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(path: Path) -> None:
    """Write through to the disk, so that a power cut cannot leave the name without the bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock that the kernel gives up when its holder dies."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the same model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
