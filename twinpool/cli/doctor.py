"""`twinpool doctor`: what this machine has, and what that makes possible.

Everything is looked up from outside: torch runs in a process of its own, so that a broken installation is a
line of the report and not the end of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from kv_transfer.nccl import complaints, find_nccl, installed_packages

_PACKAGES = (
    "twinpool",
    "torch",
    "ray",
    "grpcio",
    "cryptography",
    "numpy",
    "safetensors",
    "tokenizers",
    "starlette",
    "uvicorn",
)
_COMPILERS = ("cc", "gcc", "g++", "clang", "nvcc", "ninja")
_TORCH = """
import json, torch
from pathlib import Path
maps = open("/proc/self/maps") if Path("/proc/self/maps").exists() else []
cuda = torch.cuda.is_available()
gpus = range(torch.cuda.device_count()) if cuda else []
memory = {i: torch.cuda.mem_get_info(i) for i in gpus}
print(json.dumps({
    "version": torch.__version__,
    "built for CUDA": torch.version.cuda,
    "cpu capability": torch.backends.cpu.get_cpu_capability(),
    "built with NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
    "nccl in memory": "".join(line for line in maps if "libnccl" in line),
    "gpus": [{"name": torch.cuda.get_device_name(i), "free_bytes": memory[i][0], "total_bytes": memory[i][1]}
             for i in gpus],
}))
"""
_TORCH_LIMIT_S = 120.0
_NCCL_VERSION = """
import sys
from pathlib import Path
from kv_transfer.nccl import version_of
print(version_of(Path(sys.argv[1])))
"""


def doctor(args: argparse.Namespace) -> int:
    """Print what was found and what it means; the exit code is 0 if the model can be served at all."""
    found = look(port=args.port)
    verdicts = judge(found)
    if args.json:
        print(json.dumps({"found": found, "verdicts": verdicts}, indent=2))
    else:
        for name, value in found.items():
            print(f"{name + ':':<12}{_text(value)}")
        print()
        for name, (is_good, why) in verdicts.items():
            print(f"[{'ok' if is_good else 'no'}] {name}: {why}")
    return 0 if verdicts["serve on cpu"][0] else 1


def look(*, port: int) -> dict[str, Any]:
    """Return everything that was found, by topic."""
    torch = _torch()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": {
            "free_bytes": psutil.virtual_memory().available,
            "total_bytes": psutil.virtual_memory().total,
        },
        "shm": _shm(),
        "torch": torch,
        "nccl": _nccl(torch.pop("nccl in memory", ""), torch.get("built with NCCL") or ""),
        "driver": _run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "compilers": {name: shutil.which(name) for name in _COMPILERS},
        "port": {"number": port, "is_free": _is_free(port)},
    }


def judge(found: Mapping[str, Any]) -> dict[str, tuple[bool, str]]:
    """Return what is possible and why, or why not."""
    torch, packages = found["torch"], found["packages"]
    has_torch = "error" not in torch
    gpus = torch.get("gpus", [])
    missing = [name for name, version in packages.items() if version is None]
    port = found["port"]
    has_compiler = any(found["compilers"][name] for name in ("cc", "gcc", "clang"))
    return {
        "serve on cpu": (
            has_torch and not missing,
            torch.get("error")
            or (f"missing: {', '.join(missing)}" if missing else "torch and all packages load"),
        ),
        "serve on gpu": (
            bool(gpus),
            _gpu_text(found, gpus) if has_torch else "torch does not load",
        ),
        "two pools on gpus": (
            len(gpus) > 1,
            f"{len(gpus)} GPUs"
            + (", each pool has its own" if len(gpus) > 1 else "; two workers share one with num_gpus: 0.5"),
        ),
        "nccl": _nccl_verdict(found["nccl"]),
        "port": (
            port["is_free"],
            f"{port['number']} is free" if port["is_free"] else f"{port['number']} is taken; use --port",
        ),
        "compile kernels": (
            has_compiler,
            "a C compiler is here" if has_compiler else "no C compiler; nothing needs one",
        ),
    }


def _gpu_text(found: Mapping[str, Any], gpus: list[Mapping[str, Any]]) -> str:
    if gpus:
        return f"{len(gpus)} x {gpus[0]['name']}; use --device cuda"
    if found["torch"].get("built for CUDA") is None:
        return "this torch is built without CUDA" + (" although there is a driver" if found["driver"] else "")
    return "no GPU is visible" if found["driver"] else "no NVIDIA driver"


def _torch() -> dict[str, Any]:
    text = _run([sys.executable, "-c", _TORCH], timeout_s=_TORCH_LIMIT_S)
    if text is None:
        return {"error": "torch does not load"}
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def _nccl(memory_map: str, built_with: str) -> dict[str, Any]:
    """Return which NCCL a worker would use, which others there are, and what may be wrong with it."""
    libraries = find_nccl(os.environ, memory_map=memory_map)
    packages = {name: version for name, (version, _) in installed_packages().items()}
    used = _run([sys.executable, "-c", _NCCL_VERSION, str(libraries[0].path)]) if libraries else None
    return {
        "version": used,
        "files": [f"{library.path} ({library.source})" for library in libraries],
        "packages": packages,
        "complaints": complaints(libraries, packages=packages, used=used or "", built_with=built_with),
    }


def _nccl_verdict(nccl: Mapping[str, Any]) -> tuple[bool, str]:
    if not nccl["files"]:
        return False, "not found; KV travels without it"
    said = f"{nccl['version'] or 'not usable'}, {nccl['files'][0]}"
    return nccl["version"] is not None and not nccl["complaints"], "; ".join([said, *nccl["complaints"]])


def _run(command: list[str], *, timeout_s: float = 20.0) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shm() -> dict[str, int] | None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    return {"free_bytes": usage.free, "total_bytes": usage.total}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except (OSError, OverflowError):
            return False
    return True


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(_word(name, item) for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(_text(item) for item in value) or "none"
    return "none" if value is None else str(value)


def _word(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{name.removesuffix('_bytes')} {value / 2**30:.1f} GiB"
    return f"{name} {_text(value)}"
