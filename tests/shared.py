"""Reference data that lies beside the checkout, if it does; what is absent is skipped with its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("TWINPOOL_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def smollm2_references() -> list[dict[str, Any]]:
    """Return prompts, prompt ids and greedy ids of SmolLM2-135M-Instruct in fp32."""
    path = SHARED / "smollm2" / "reference.json"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    items: list[dict[str, Any]] = json.loads(path.read_text())["items"]
    return items


def vectors() -> dict[str, dict[str, Any]]:
    """Return test vectors by id, with inputs, expected values, tolerance and source; none if not here."""
    path = SHARED / "vectors" / "vectors.json"
    if not path.exists():
        return {}
    return {vector["id"]: vector for vector in json.loads(path.read_text())["vectors"]}
