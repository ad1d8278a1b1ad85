"""The lab's public names: each is there, has a docstring, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from twinpool import lab


@pytest.mark.parametrize("name", lab.__all__)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(lab, name).__doc__


def test_another_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        lab.Nothing  # noqa: B018


def test_importing_the_lab_loads_nothing_heavy() -> None:
    code = (
        "import sys, twinpool.lab; print([m for m in ('numpy', 'torch', 'ray', 'grpc') if m in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"
