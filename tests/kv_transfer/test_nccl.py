"""Which NCCL is used is found by looking at files, and what may be wrong with it is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kv_transfer.nccl import (
    NcclLibrary,
    complaints,
    find_nccl,
    installed_packages,
    libraries_in,
    version_of,
    version_text,
)
from tests.kv_transfer.fake_cuda import compiled
from twinpool.core.errors import ConfigError

MAP = """\
7f0000000000-7f0000001000 r-xp 00000000 fe:00 1234  /opt/torch/lib/libtorch_cuda.so
7f0000001000-7f0000002000 r--p 00000000 fe:00 1235  /venv/lib/site packages/nvidia/nccl/lib/libnccl.so.2
7f0000002000-7f0000003000 r-xp 00001000 fe:00 1235  /venv/lib/site packages/nvidia/nccl/lib/libnccl.so.2
7f0000003000-7f0000004000 rw-p 00000000 00:00 0     [heap]
7f0000004000-7f0000005000 rw-p 00000000 00:00 0
"""
LOADED = Path("/venv/lib/site packages/nvidia/nccl/lib/libnccl.so.2")


def install(folder: Path, package: str, version: str, *, with_library: bool = True) -> None:
    """Leave behind what an installer would."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    library = folder / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True, exist_ok=True)
    if with_library:
        library.write_bytes(b"")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (2307, "2.3.7"),
        (2804, "2.8.4"),
        (20905, "2.9.5"),
        (21805, "2.18.5"),
        (22703, "2.27.3"),
        (22809, "2.28.9"),
    ],
)
def test_a_version_code_is_read_as_nccl_writes_it(code: int, text: str) -> None:
    assert version_text(code) == text


def test_loaded_libraries_are_read_from_the_memory_map() -> None:
    assert libraries_in(MAP, "libnccl.so") == (LOADED,)
    assert libraries_in(MAP, "libcudart.so") == ()
    assert libraries_in("", "libnccl.so") == ()


def test_the_variable_counts_for_more_than_what_is_loaded_and_that_for_more_than_packages(
    tmp_path: Path,
) -> None:
    install(tmp_path, "nvidia-nccl-cu13", "2.28.9")
    package = NcclLibrary(path=tmp_path / "nvidia/nccl/lib/libnccl.so.2", source="nvidia-nccl-cu13 2.28.9")
    loaded = NcclLibrary(path=LOADED, source="loaded")
    named = NcclLibrary(path=Path("/opt/libnccl.so"), source="TWINPOOL_NCCL")
    folders = [str(tmp_path)]

    assert find_nccl({}, folders=folders) == (package,)
    assert find_nccl({}, memory_map=MAP, folders=folders) == (loaded, package)
    environ = {"TWINPOOL_NCCL": "/opt/libnccl.so"}
    assert find_nccl(environ, memory_map=MAP, folders=folders) == (named, loaded, package)
    assert find_nccl({}, folders=[]) == ()


def test_a_package_without_its_library_brings_none(tmp_path: Path) -> None:
    install(tmp_path, "nvidia-nccl-cu12", "2.27.3", with_library=False)

    assert find_nccl({}, folders=[str(tmp_path)]) == ()
    assert list(installed_packages([str(tmp_path)])) == ["nvidia-nccl-cu12"]


def test_two_packages_that_overwrite_each_other_are_found_both(tmp_path: Path) -> None:
    install(tmp_path, "nvidia-nccl-cu12", "2.27.3")
    install(tmp_path, "nvidia-nccl-cu13", "2.28.9")
    libraries = find_nccl({}, folders=[str(tmp_path)])
    packages = {name: version for name, (version, _) in installed_packages([str(tmp_path)]).items()}

    assert len({library.path for library in libraries}) == 1
    assert complaints(libraries, packages=packages, used="2.28.9", built_with="2.27.3") == [
        "nvidia-nccl-cu12 2.27.3 and nvidia-nccl-cu13 2.28.9 are both installed and write the same file",
        f"torch was built with 2.27.3 and uses 2.28.9 from {libraries[0].path}",
        f"{libraries[0].path} is 2.28.9, not the 2.27.3 that was installed there",
    ]


@pytest.mark.parametrize(("used", "built_with"), [("2.28.9", "2.28.9"), ("", "2.28.9"), ("2.28.9", "")])
def test_one_package_that_torch_was_built_with_is_no_complaint(
    tmp_path: Path, used: str, built_with: str
) -> None:
    install(tmp_path, "nvidia-nccl-cu13", "2.28.9")
    libraries = find_nccl({}, folders=[str(tmp_path)])

    found = complaints(libraries, packages={"nvidia-nccl-cu13": "2.28.9"}, used=used, built_with=built_with)

    assert found == []


def test_the_version_of_a_library_is_what_it_says(tmp_path: Path) -> None:
    assert version_of(compiled(tmp_path, "libnccl.so.2")) == "2.28.9"


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_file_that_is_no_nccl_is_a_setting_that_cannot_work(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "libnccl.so"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"^TWINPOOL_NCCL: .*libnccl\.so cannot be used as NCCL"):
        version_of(path)


def test_a_library_without_ncclgetversion_is_refused() -> None:
    libc = next(path for path in libraries_in(Path("/proc/self/maps").read_text(), "libc.so"))

    with pytest.raises(ConfigError, match="cannot be used as NCCL"):
        version_of(libc)


def test_what_the_variable_names_is_in_memory_before_torch_is(tmp_path: Path) -> None:
    library = compiled(tmp_path, "libnccl.so.2")
    code = "\n".join(
        [
            "from kv_transfer import nccl",
            f"nccl.preload({{'TWINPOOL_NCCL': {str(library)!r}}})",
            "print(nccl.loaded_version())",
            "import torch",
            f"nccl.preload({{'TWINPOOL_NCCL': {str(library)!r}}})",
        ]
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.stdout == "2.28.9\n"
    assert "TWINPOOL_NCCL: torch is loaded, and has its NCCL" in done.stderr
