"""Sizes are read, budgets become blocks, and what cannot work is refused by name."""

from __future__ import annotations

import psutil
import pytest

from tests.toys import layout
from twinpool.core.errors import ConfigError
from twinpool.core.units import parse_bytes
from twinpool.engine.memory import default_budget_bytes, num_blocks_for


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        (" 64 kib ", 65536),
        ("1048576", 1048576),
        ("7b", 7),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "1 GiB x", "12 parsecs", "nan", "0", "0.1b", "\u0661GB", "1.GiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"workers.kv_memory: ") as caught:
        parse_bytes(text, field="workers.kv_memory")

    assert caught.value.field == "workers.kv_memory"


@pytest.mark.parametrize("text", ["80", "1.5", " 999 "])
def test_a_forgotten_unit_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--memory: .* has no unit, as in {text.strip()}GiB"):
        parse_bytes(text, field="--memory")


def test_a_budget_is_rounded_down_to_blocks() -> None:
    shape = layout()  # 2 layers x 64 bytes x 16 tokens

    assert num_blocks_for(shape, 10 * 2048 + 2047) == 10


def test_a_budget_of_less_than_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-memory: 4095 bytes hold 1 blocks of 2048, needed are 2"):
        num_blocks_for(layout(), 4095)


def test_the_default_leaves_most_of_the_memory_alone() -> None:
    budget = default_budget_bytes("cpu")

    assert 0 < budget < psutil.virtual_memory().total // 2
