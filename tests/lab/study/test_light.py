"""What a study needs for its figures is loaded when one is drawn, and not before."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["twinpool.cli.study", "twinpool.lab.study.report", "twinpool.cli.app"])
def test_matplotlib_is_not_loaded_with_the_commands(module: str) -> None:
    heavy = ("matplotlib", "torch", "ray")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"
