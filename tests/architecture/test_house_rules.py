"""The doors of the house: what the linters do not check by themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("twinpool", "router", "prefill_service", "decode_service", "kv_transfer")
MODULES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "pb" not in path.relative_to(ROOT).parts
)


def test_the_import_name_proto_stays_free() -> None:
    assert not (ROOT / "proto" / "__init__.py").exists(), "`proto` belongs to proto-plus"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is_and_is_ascii(path: Path) -> None:
    source = path.read_bytes()
    tree = ast.parse(source)

    assert source.isascii(), "non-ASCII character in code"
    if path.name != "__init__.py":
        assert ast.get_docstring(tree), "no module docstring"


UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "jsonpickle",
    "joblib",
}
# Of any object: torch.load, numpy.load(allow_pickle=True), yaml.load, yaml.unsafe_load ...
UNSAFE_CALLS = {
    "torch": {"load", "package", "hub"},
    "yaml": {"load", "load_all", "full_load", "unsafe_load", "full_load_all", "unsafe_load_all"},
    "np": {"load"},
    "numpy": {"load"},
    "builtins": {"eval", "exec", "compile"},
}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}
# Of torch.distributed: they pickle what they carry.
UNSAFE_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def unsafe(source: str) -> list[str]:
    """Return what in a module could run code out of bytes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            found += [module] if module in UNSAFE_MODULES else []
            names = UNSAFE_CALLS.get(module, set()) | UNSAFE_COLLECTIVES
            found += [f"{module}.{alias.name}" for alias in node.names if alias.name in names]
        elif isinstance(node, ast.Name) and node.id in UNSAFE_BUILTINS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in UNSAFE_CALLS.get(owner, set()) | UNSAFE_COLLECTIVES:
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg in (
            "allow_pickle",
            "weights_only",
            "trust_remote_code",
        ):
            found.append(node.arg)
        elif isinstance(node, ast.ClassDef):
            found += [
                f"class {node.name}(Unpickler)" for base in node.bases if "Unpickler" in ast.unparse(base)
            ]
        elif isinstance(node, ast.Constant) and node.value in UNSAFE_MODULES:
            found.append(f"{node.value!r}")  # for importlib
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_runs_code_out_of_bytes(path: Path) -> None:
    assert unsafe(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from dill import loads",
        "import torch\ntorch.load(f)",
        "from torch import load",
        "x = torch.load",
        "import yaml\nyaml.load(f, Loader=yaml.SafeLoader)",
        "np.load(f, allow_pickle=True)",
        "eval(s)",
        "run = exec",
        "dist.broadcast_object_list([])",
        "import importlib\nimportlib.import_module('marshal')",
        "class Safe(pickle.Unpickler): pass",
        "AutoModel.from_pretrained(m, trust_remote_code=True)",
    ],
)
def test_what_runs_code_out_of_bytes_is_found(source: str) -> None:
    assert unsafe(source)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("router.router", ("torch", "ray", "transformers")),
        ("router.http.app", ("torch", "ray", "transformers")),
        ("twinpool.text.tokenizer", ("torch", "ray", "transformers")),
        ("twinpool.cli", ("torch", "ray", "grpc", "transformers", "starlette", "numpy")),
        ("twinpool.engine.scheduler", ("torch", "ray", "grpc")),
        ("kv_transfer.receiver", ("torch", "ray")),
    ],
)
def test_importing_a_module_does_not_load_what_it_does_not_need(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )

    assert done.stdout.strip() == "[]"
