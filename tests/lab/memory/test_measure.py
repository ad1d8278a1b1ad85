"""Real workers take what was planned for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.checkpoints_toy import make_checkpoint
from tests.lab.memory.configs import CONFIGS
from twinpool.checkpoints.embedded import EMBEDDED_NAME
from twinpool.checkpoints.resolve import resolve_model
from twinpool.core.errors import ConfigError, Unavailable
from twinpool.core.ports import Role
from twinpool.engine.config import EngineConfig
from twinpool.lab.memory.cache_format import FORMATS
from twinpool.lab.memory.measuring.comparison import ComparedTerm, compare
from twinpool.lab.memory.measuring.measure import measure_plan
from twinpool.lab.memory.memory_plan import MemoryPlan, plan_memory
from twinpool.lab.memory.planned_model import model_of, read_model
from twinpool.lab.memory.worker_plan import WorkerShape


def shape(role: Role, **settings: object) -> WorkerShape:
    peers = 0 if role is Role.COLOCATED else 1
    cpu: dict[str, object] = {"memory_bytes": 4 * 2**30, "dtype": "float32", "is_gpu": False}
    return WorkerShape(role=role, num_peers=peers, **{**cpu, **settings})  # type: ignore[arg-type]


def measured(made: MemoryPlan, folder: Path) -> dict[Role, dict[str, ComparedTerm]]:
    found = asyncio.run(measure_plan(made, folder))
    return {
        plan.worker.role: {row.name: row for row in compare(plan, found[plan.worker.role])}
        for plan in made.workers
    }


def test_a_pair_of_small_workers_takes_what_was_planned(tmp_path: Path) -> None:
    """The model has 118 kB; what is measured here is the program, and that no part is forgotten."""
    make_checkpoint(tmp_path, "qwen3")
    engine = EngineConfig(max_batch_tokens=512, max_sequences=16)
    cache_bytes = 8 * 2**20
    roles = (Role.PREFILL, Role.DECODE)
    workers = [shape(role, cache_bytes=cache_bytes, engine=engine) for role in roles]

    model = read_model(tmp_path)
    stored = sum(tensor.num_bytes for tensor in model.stored.values())

    compared = measured(plan_memory(model, workers), tmp_path)

    # Blocks of 16 tokens: 2 layers x key and value x 2 heads x 32 elements x 4 bytes each.
    block_bytes = 16 * 2 * 2 * 2 * 32 * 4
    assert set(compared) == set(roles)
    for parts in compared.values():
        assert parts["KV cache"].measured_bytes == cache_bytes // block_bytes * block_bytes
        assert parts["KV cache"].error == parts["weights"].error == 0.0
        assert parts["weights"].measured_bytes == stored
        assert 0 < parts["activations"].measured_bytes <= parts["activations"].planned_bytes
        assert 0 < parts["per-peer buffers"].measured_bytes <= parts["per-peer buffers"].planned_bytes


@pytest.mark.slow
@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.COLOCATED,)])
def test_the_peak_of_smollm2_is_within_a_tenth_of_the_sum(roles: tuple[Role, ...]) -> None:
    folder = resolve_model(EMBEDDED_NAME)
    workers = [shape(role, cache_bytes=64 * 2**20) for role in roles]

    compared = measured(plan_memory(read_model(folder), workers), folder)

    for parts in compared.values():
        assert (
            parts["KV cache"].measured_bytes == 91 * 16 * 46080  # as in docs/operations.md
        )  # 91 blocks of 16 tokens, as in operations.md
        assert parts["KV cache"].error == parts["weights"].error == 0.0
        assert parts["activations"].measured_bytes <= parts["activations"].planned_bytes
        assert abs(parts["sum"].error) < 0.10


@pytest.mark.parametrize(
    ("model", "settings", "problem"),
    [
        ("Jamba-v0.1", {}, "--measure: this engine does not run jamba"),
        ("Llama-2-7b-hf", {"memory_bytes": 2**40}, "--kv-memory: is missing: to measure all that is left"),
        ("Llama-2-7b-hf", {"cache_bytes": 2**30}, r"--measure: \d+ bytes are missing for colocated"),
        ("Llama-2-7b-hf", {"num_ranks": 2}, "--measure: 2 ranks; workers of one rank are measured"),
        (
            "Llama-2-7b-hf",
            {"cache_form": FORMATS["fp8"]},
            "--cache-format: this engine keeps KV in",
        ),
    ],
)
def test_what_cannot_run_here_is_not_measured(
    tmp_path: Path, model: str, settings: dict[str, object], problem: str
) -> None:
    made = plan_memory(model_of(CONFIGS[model]), [shape(Role.COLOCATED, **settings)])

    with pytest.raises(ConfigError, match=problem):
        asyncio.run(measure_plan(made, tmp_path))


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    made = plan_memory(read_model(tmp_path), [shape(Role.COLOCATED, cache_bytes=2**20)])
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(Unavailable, match=r"the measured worker: --model: .* holds neither"):
        asyncio.run(measure_plan(made, tmp_path))


def test_a_cache_that_is_too_small_to_measure_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    made = plan_memory(read_model(tmp_path), [shape(Role.COLOCATED, cache_bytes=32768)])

    with pytest.raises(ConfigError, match="--kv-memory: 64 tokens are too few to measure anything"):
        asyncio.run(measure_plan(made, tmp_path))
