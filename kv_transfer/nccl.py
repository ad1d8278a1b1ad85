"""Which NCCL a process uses, or would use: where the library lies, who brought it and how old it is.

NCCL comes in a package of its own, ``nvidia-nccl-cu12`` or ``nvidia-nccl-cu13``.  Both put their library
into the same folder, as torch's own dependency does, so whichever was installed last is there; what is used
is found by looking and not by asking the package manager.  Needs no torch and no GPU.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.core.errors import ConfigError

VARIABLE = "TWINPOOL_NCCL"  # of the environment: the library to use, in place of what torch finds
PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_NAME = "libnccl.so"
_IN_PACKAGE = "nvidia/nccl/lib/libnccl.so.2"
_MEMORY_MAP = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLibrary:
    """A file that can be used, and who named it."""

    path: Path
    source: str  # the variable, "loaded", or a package with its version


def find_nccl(
    environ: Mapping[str, str], *, memory_map: str = "", folders: Sequence[str] | None = None
) -> tuple[NcclLibrary, ...]:
    """Return the libraries that could be used; the first one is.

    Args:
        environ: Of the process.
        memory_map: Its ``/proc/PID/maps``: what is loaded counts for more than what is installed.
        folders: Where packages are installed; None: where this process looks.
    """
    found = []
    if environ.get(VARIABLE):
        found.append(NcclLibrary(path=Path(environ[VARIABLE]), source=VARIABLE))
    found += [NcclLibrary(path=path, source="loaded") for path in libraries_in(memory_map, _NAME)]
    for package, (version, path) in installed_packages(folders).items():
        if path.is_file():
            found.append(NcclLibrary(path=path, source=f"{package} {version}"))
    return tuple(found)


def installed_packages(folders: Sequence[str] | None = None) -> dict[str, tuple[str, Path]]:
    """Return the packages that bring an NCCL, with version and library; nothing is imported."""
    paths = list(sys.path if folders is None else folders)
    return {
        package: (found.version, Path(str(found.locate_file(_IN_PACKAGE))))
        for package in PACKAGES
        for found in list(importlib.metadata.distributions(name=package, path=paths))[:1]
    }


def libraries_in(memory_map: str, name: str) -> tuple[Path, ...]:
    """Return the files called ``name``, or ``name`` and a version, in a ``/proc/PID/maps``."""
    paths = (line.split(maxsplit=5)[5] for line in memory_map.splitlines() if line.count("/"))
    return tuple(dict.fromkeys(Path(path) for path in paths if Path(path).name.startswith(name)))


def own_memory_map() -> str:
    """Return the ``/proc/PID/maps`` of this process; empty where there is none."""
    return _MEMORY_MAP.read_text() if _MEMORY_MAP.exists() else ""


def loaded_version() -> str:
    """Return the version of the NCCL in this process, as in ``2.28.9``; empty if there is none."""
    for path in libraries_in(own_memory_map(), _NAME):
        return version_of(path)
    return ""


def version_of(path: Path) -> str:
    """Load a library and return its version.

    Raises:
        ConfigError: It is no NCCL, or cannot be loaded here.
    """
    code = ctypes.c_int()
    try:
        failed = ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError) as error:
        raise ConfigError(VARIABLE, f"{path} cannot be used as NCCL: {error}") from None
    if failed:
        raise ConfigError(VARIABLE, f"{path} does not say its version: error {failed}")
    return version_text(code.value)


def version_text(code: int) -> str:
    """Spell NCCL_VERSION_CODE: MAJOR * 1000 + MINOR * 100 + PATCH up to 2.8, and 10000 from 2.9 on."""
    thousands = 1000 if code < 10_000 else 10_000
    return f"{code // thousands}.{code % thousands // 100}.{code % 100}"


def preload(environ: Mapping[str, str]) -> None:
    """Load the library that ``TWINPOOL_NCCL`` names, so that torch, which is not loaded yet, uses it.

    The dynamic linker takes a library that is in memory already, by its name, for the one that is asked for.

    Raises:
        ConfigError: It cannot be loaded, or torch is loaded already.
    """
    path = environ.get(VARIABLE)
    if not path:
        return
    if "torch" in sys.modules:
        raise ConfigError(VARIABLE, "torch is loaded, and has its NCCL")
    version_of(Path(path))
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def complaints(
    libraries: Sequence[NcclLibrary], *, packages: Mapping[str, str], used: str, built_with: str
) -> list[str]:
    """Say what may go wrong; empty if nothing seems to.

    Args:
        libraries: As found; the first is used.
        packages: That bring an NCCL, with their versions.
        used: Version of the library that is used; empty if it cannot be told.
        built_with: Version that torch was built with; empty if without any.
    """
    found = []
    if len(packages) > 1:
        both = " and ".join(f"{name} {version}" for name, version in packages.items())
        found.append(f"{both} are both installed and write the same file")
    if used and built_with and used != built_with:
        found.append(f"torch was built with {built_with} and uses {used} from {libraries[0].path}")
    own = packages.get(libraries[0].source.partition(" ")[0]) if libraries else None
    if own is not None and used and own.split(".post")[0] != used:
        found.append(f"{libraries[0].path} is {used}, not the {own} that was installed there")
    return found
