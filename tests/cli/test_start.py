"""The command line starts fast: it loads a heavy library only for the command that needs it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "ray", "grpc", "cryptography", "starlette", "uvicorn", "tokenizers", "pydantic", "numpy")


def seconds_of(*args: str) -> float:
    """The best of three runs, so that a busy machine counts less."""
    times = []
    for _ in range(3):
        started_s = time.monotonic()
        subprocess.run([sys.executable, *args], check=True, capture_output=True)
        times.append(time.monotonic() - started_s)
    return min(times)


@pytest.mark.parametrize(
    "args",
    [["--help"], ["serve", "--help"], ["doctor", "--help"], ["kv-bench", "--help"], ["plan", "--help"]],
)
def test_help_loads_no_heavy_library(args: list[str]) -> None:
    program = (
        "import sys\n"
        "from twinpool.cli import main\n"
        "try:\n"
        f"    main({args!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )

    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

    assert "usage: twinpool" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_reading_a_deployment_loads_neither_torch_nor_ray() -> None:
    program = (
        "import sys\n"
        "from twinpool.cli import main\n"
        "main(['serve', '--print-config'])\n"
        "import twinpool.cluster.serve\n"
        "print('loaded:', [name for name in ('torch', 'ray') if name in sys.modules])\n"
    )

    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_help_takes_a_few_times_as_long_as_python_itself() -> None:
    bare_s = seconds_of("-c", "pass")

    help_s = seconds_of("-m", "twinpool", "--help")

    assert help_s < 20 * bare_s, f"{help_s:.2f} s, python alone takes {bare_s:.2f} s"
