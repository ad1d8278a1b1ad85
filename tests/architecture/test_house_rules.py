"""The doors of the house: what the linters do not check by themselves."""

from __future__ import annotations

import ast
import re
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


def test_no_module_opens_foreign_bytes_with_code_in_them() -> None:
    forbidden = re.compile(
        r"\b(pickle|dill|cloudpickle|marshal|shelve)\b|torch\.load\(|yaml\.load\(|\beval\("
    )
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in MODULES
        for match in forbidden.finditer(_code_only(path))
    ]

    assert not found


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


def _code_only(path: Path) -> str:
    """Return the source without docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                first.value = ast.Constant("")
    return ast.unparse(tree)
