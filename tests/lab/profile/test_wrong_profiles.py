"""A profile with a number that no worker has is refused by its field, before anything is simulated."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.core.config import bind
from twinpool.core.errors import ConfigError
from twinpool.lab.profile.profile import Profile

RIGHT: dict[str, Any] = {
    "name": "toy",
    "source": "made up",
    "hardware": "none",
    "engine": "none",
    "model": {"name": "toy", "num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "max_tokens": 128},
    "kv_cache_bytes": 2**20,
    "measured": {
        "prefill": [[1, 8, 0, 0.1], [1, 16, 0, 0.2], [1, 8, 8, 0.15]],
        "decode": [[1, 8, 0.01], [2, 8, 0.02]],
    },
}
PREFILL, DECODE = RIGHT["measured"]["prefill"], RIGHT["measured"]["decode"]


def profile(**changes: Any) -> Profile:
    return bind(Profile, {**RIGHT, **changes})


def with_prompt(row: list[float]) -> dict[str, Any]:
    return {"measured": {"prefill": [*PREFILL, row], "decode": DECODE}}


def with_decode(row: list[float]) -> dict[str, Any]:
    return {"measured": {"prefill": PREFILL, "decode": [*DECODE, row]}}


def with_formula(**changes: Any) -> dict[str, Any]:
    formula = {"prefill": [0.1, 0.1, 0.0], "decode": [0.1, 0.0, 0.0], **changes}
    return {"measured": None, "polynomial": formula}


def with_table(*rows: list[float]) -> dict[str, Any]:
    return {"measured": None, "batch_tokens": {"prefill": list(rows), "decode": [[1, 0.1]]}}


def test_the_right_ones_are_taken() -> None:
    """1 MiB of blocks of 16 tokens: 2 x 2 layers x 2 heads x 8 elements x 2 bytes = 128 a token."""
    assert profile().num_blocks(block_tokens=16) == 2**20 // (16 * 128)
    assert profile(**with_formula()).cost_model().step_s([], 1, 8) == 0.1
    assert profile(**with_table([8, 0.1], [16, 0.2])).batch_tokens is not None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        *(
            ({"model": {**RIGHT["model"], name: value}}, f"model.{name}: {value} is less than 1")
            for name in ("num_layers", "num_kv_heads", "head_dim", "max_tokens")
            for value in (0, -1)
        ),
        (
            {"model": {**RIGHT["model"], "dtype": "floaty"}},
            "model.dtype: 'floaty' is none of float32, bfloat16",
        ),
        ({"tp": 0}, "tp: 0 is less than 1"),
        ({"tp": -1}, "tp: -1 is less than 1"),
        (with_prompt([1, 8, 0, 0.3]), r"measured.prefill\[3\]: \[1.0, 8.0, 0.0\] was measured before"),
        (
            with_prompt([1, 0, 0, 0.3]),
            r"measured.prefill\[3\]: \[1.0, 0.0, 0.0, 0.3\] has a number below 1, 1, 0",
        ),
        (with_prompt([1, 32, 0]), r"measured.prefill\[3\]: \[1.0, 32.0, 0.0\] is no row of 4 values"),
        (
            with_prompt([1, 32, 0, 5e-324]),
            r"measured.prefill\[3\]: 4.94066e-324 s is not in \[1e-09, 1e\+09\]",
        ),
        (with_decode([4, 8, 1e300]), r"measured.decode\[2\]: 1e\+300 s is not in"),
        (with_decode([0, 8, 0.1]), r"measured.decode\[2\]: \[0.0, 8.0, 0.1\] has a number below 1, 0"),
        (with_decode([2, 8, 0.1]), r"measured.decode\[2\]: \[2.0, 8.0\] was measured before"),
        (with_formula(prefill=[0.1, -0.1, 0.0]), "polynomial.prefill: -0.1 is less than 0"),
        (with_formula(decode=[1e300, 0.0, 0.0]), r"polynomial.decode: a token takes 1e\+300 s"),
        (with_formula(large_batch=9), "polynomial.decode_large: has 0 numbers, not three"),
        (with_formula(large_batch=-1), "polynomial.large_batch: -1 is less than 0"),
        (with_table([8, 0.1], [8, 0.2]), r"batch_tokens.prefill\[1\]: \[8.0\] was measured before"),
        (with_table(), "batch_tokens.prefill: has no row"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_field(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        profile(**changes)


def test_more_blocks_than_a_simulation_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes: 10+ holds 4882812500+ blocks, more"):
        profile(kv_cache_bytes=10**30).num_blocks(block_tokens=16)
