"""Replays: what public simulators, papers and plain arithmetic say, found again by the live engine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from tests.lab.profile.bounds import colocated_rate, disaggregated_rate, mean_ttft_s
from tests.shared import vectors
from twinpool.core.config import to_yaml
from twinpool.core.errors import ConfigError
from twinpool.core.layout import KVLayout
from twinpool.core.ports import Role
from twinpool.engine.config import EngineConfig
from twinpool.lab.profile.polynomial import Polynomial
from twinpool.lab.profile.profile import ModelShape, Profile, load_profile
from twinpool.lab.record import Record
from twinpool.lab.simulate.config import (
    Emulate,
    Overlap,
    Pool,
    SimulationConfig,
    Transfer,
)
from twinpool.lab.simulate.link import SharedLink
from twinpool.lab.simulate.simulation import run_simulation
from twinpool.lab.simulate.transfer import token_bytes
from twinpool.lab.workload.item import WorkItem

KNOWN = vectors()
pytestmark = pytest.mark.skipif(not KNOWN, reason="vectors.json is not here")

PATIENT = RouterConfig(
    prefill_depth=10_000,
    max_running_per_worker=10_000,
    max_queued=1_000_000,
    queue_timeout_s=1e6,
    request_timeout_s=1e6,
)
WHOLE_PROMPTS = EngineConfig(max_batch_tokens=16_384, max_chunk_tokens=0, max_waiting=10_000)


def of(prefix: str) -> list[str]:
    return sorted(name for name in KNOWN if name.startswith(prefix))


def arrivals(rows: Iterable[Iterable[float]]) -> Iterator[WorkItem]:
    for index, (at_s, prompt, output) in enumerate(rows):
        yield WorkItem(index=index, arrival_s=at_s, prompt_tokens=int(prompt), output_tokens=int(output))


def run(items: Iterable[WorkItem], config: SimulationConfig) -> list[Record]:
    found: list[Record] = []
    run_simulation(items, config, on_record=found.append)
    assert not [record.error for record in found if record.error]
    return sorted(found, key=lambda record: record.index)


def profile_file(folder: Path, *, num_layers: int = 80, num_kv_heads: int = 8, **polynomial: Any) -> str:
    """A worker whose times are a formula; its KV takes 327,680 bytes a token as Llama-3.1-70B's does."""
    profile = Profile(
        name="formula",
        source="this test",
        hardware="none",
        engine="none",
        model=ModelShape(
            name="formula", num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=128, max_tokens=100_000
        ),
        kv_cache_bytes=400_000_000_000,
        polynomial=Polynomial(**polynomial),
    )
    text = to_yaml(profile).replace("measured: null\n", "").replace("batch_tokens: null\n", "")
    path = folder / "formula.yaml"
    path.write_text(text)
    return str(path)


def test_a_profile_by_which_time_stands_still_is_refused(tmp_path: Path) -> None:
    profile = profile_file(tmp_path, prefill=(0.1, 0.0, 0.0), decode=(0.0, 0.0, 0.0))
    pool = Pool(role=Role.COLOCATED, workers=1, profile=profile)
    with pytest.raises(ConfigError, match="profile: of colocated-0 says that a step takes 0 s"):
        run(arrivals([(0.0, 8, 3)]), SimulationConfig(pools=(pool,)))


@pytest.mark.parametrize("name", of("simdistserve"))
def test_simdistserve(name: str) -> None:
    """DistServe's simulator, which knows no KV transfer and decodes a token too many."""
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    pools = tuple(
        Pool(role=role, workers=1, profile="a100-opt-13b", engine=WHOLE_PROMPTS)
        for role in (Role.PREFILL, Role.DECODE)
    )
    config = SimulationConfig(pools=pools, router=PATIENT, emulate=Emulate.SIMDISTSERVE)

    found = run(arrivals(given["trace"]), config)

    for record, expected, (_, _, output) in zip(found, wanted["per_request"], given["trace"], strict=True):
        assert record.ttft_s is not None and record.e2e_s is not None
        assert 1e3 * record.ttft_s == pytest.approx(expected["ttft_ms"], rel=1e-6)
        assert 1e3 * record.e2e_s == pytest.approx(expected["total_ms"], rel=1e-6)
        tpot_ms = 1e3 * (record.e2e_s - record.ttft_s) / output
        assert tpot_ms == pytest.approx(expected["tpot_ms"], rel=1e-6)


def test_simdistserve_is_not_met_without_its_switch() -> None:
    given = KNOWN["simdistserve-one-distserve"]
    pools = tuple(
        Pool(role=role, workers=1, profile="a100-opt-13b", engine=WHOLE_PROMPTS)
        for role in (Role.PREFILL, Role.DECODE)
    )
    (record,) = run(arrivals(given["inputs"]["trace"]), SimulationConfig(pools=pools, router=PATIENT))
    expected = given["expected"]["per_request"][0]
    assert record.ttft_s is not None and record.e2e_s is not None
    assert 1e3 * record.ttft_s == pytest.approx(expected["ttft_ms"] - 3.0 - 1e-4 * 512, rel=1e-9)
    assert record.output_tokens == 10
    assert record.kv_bytes == 512 * 2 * 40 * 40 * 128 * 2


def test_splitwise_test_baseline() -> None:
    """One DGX-H100 that does both, as splitwise-sim's own example and its committed notebook have it."""
    vector = KNOWN["splitwise-test-baseline"]
    pool = Pool(role=Role.COLOCATED, workers=1, profile="h100-bloom-176b-tp8", engine=WHOLE_PROMPTS)
    config = SimulationConfig(
        pools=(pool,), router=PATIENT, max_model_tokens=16_384, emulate=Emulate.SPLITWISE_SIM
    )

    found = run(arrivals(vector["inputs"]["trace"]), config)

    wanted = vector["expected"]
    assert [record.ttft_s for record in found] == pytest.approx(wanted["ttft_s"], abs=1e-9)
    assert [record.e2e_s for record in found] == pytest.approx(wanted["response_s"], abs=1e-9)
    assert max(record.end_s or 0.0 for record in found) == pytest.approx(wanted["end_s"], abs=1e-9)


@pytest.mark.parametrize("name", of("xfer-Llama"))
def test_a_transfer_alone_takes_its_bytes_at_line_rate(name: str) -> None:
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    shipped = {"Llama-3.1-8B": "h100-llama-3.1-8b", "Llama-3.1-70B": "h100-llama-3.1-70b-tp4"}
    layout = load_profile(shipped[given["model"]]).layout(block_tokens=16)
    num_bytes = given["tokens"] * token_bytes(layout, layout)
    for link, ms in wanted["ms"].items():
        left_s = SharedLink(given["links_bytes_per_s"][link]).burst(num_bytes, now_s=0.0)
        assert 1e3 * left_s == pytest.approx(ms, rel=1e-4, abs=1e-4)


def test_xfer_splitwise_bloom() -> None:
    vector = KNOWN["xfer-splitwise-bloom-2048"]
    layout = load_profile("h100-bloom-176b-tp8").layout(block_tokens=16)
    num_bytes = vector["inputs"]["tokens"] * token_bytes(layout, layout)
    left_s = SharedLink(vector["inputs"]["bandwidth_bytes_per_s"]).burst(num_bytes, now_s=0.0)
    assert left_s == vector["expected"]["seconds"]


def test_xfer_distserve() -> None:
    """OPT-66B: 64 layers, 72 heads of 128, 2 bytes (its config.json); DistServe, section 3.3, has 1.13 GB."""
    vector = KNOWN["xfer-distserve"]
    layout = KVLayout(num_layers=64, num_kv_heads=72, head_dim=128, block_tokens=16, dtype="float16")
    num_bytes = vector["inputs"]["tokens"] * token_bytes(layout, layout)
    assert num_bytes == vector["expected"]["bytes_per_request"]
    assert num_bytes / 2**30 == pytest.approx(1.13, rel=0.01)
    assert num_bytes * vector["inputs"]["rate_rps"] / 2**30 == pytest.approx(11.3, rel=0.01)


@pytest.mark.parametrize("name", of("overlap"))
def test_overlap(name: str, tmp_path: Path) -> None:
    """What of a transfer shows after the prompt: all of it, or what layers that left before did not hide."""
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    profile = profile_file(tmp_path, prefill=(given["prefill_s"], 0.0, 0.0), decode=(0.01, 0.0, 0.0))
    num_tokens = given["kv_bytes"] // 327_680

    def visible_s(overlap: Overlap) -> float:
        pools = tuple(
            Pool(role=role, workers=1, profile=profile, engine=WHOLE_PROMPTS)
            for role in (Role.PREFILL, Role.DECODE)
        )
        transfer = Transfer(bytes_s=given["bandwidth"], latency_s=0.0, overlap=overlap)
        (record,) = run(
            arrivals([(0.0, num_tokens, 2)]), SimulationConfig(pools=pools, router=PATIENT, transfer=transfer)
        )
        assert record.kv_bytes == given["kv_bytes"]
        return record.gaps_s[0] - 0.01

    assert visible_s(Overlap.NONE) == pytest.approx(wanted["serialized_visible_s"], rel=1e-3)
    assert visible_s(Overlap.STEPS) == pytest.approx(wanted["serialized_visible_s"], rel=1e-3)
    assert visible_s(Overlap.LAYERS) == pytest.approx(wanted["layerwise_visible_s"], rel=1e-3)
    assert given["kv_bytes"] / given["prefill_s"] == pytest.approx(wanted["bandwidth_to_hide"], rel=1e-3)


def ttfts(profile: str, *, rate: float, count: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    engine = EngineConfig(max_batch_tokens=64, max_chunk_tokens=0, max_waiting=1_000_000)

    def items() -> Iterator[WorkItem]:
        at_s = 0.0
        for index in range(count):
            at_s += draw.expovariate(rate)
            yield WorkItem(index=index, arrival_s=at_s, prompt_tokens=64, output_tokens=1)

    pools = tuple(
        Pool(role=role, workers=1, profile=profile, engine=engine) for role in (Role.PREFILL, Role.DECODE)
    )
    found: list[float] = []
    run_simulation(
        items(),
        SimulationConfig(pools=pools, router=PATIENT),
        on_record=lambda record: found.append(record.ttft_s or 0.0),
    )
    return found


@pytest.mark.parametrize("name", of("md1"))
@pytest.mark.parametrize(
    ("count", "tolerance"), [(20_000, 0.04), pytest.param(200_000, 0.02, marks=pytest.mark.slow)]
)
def test_md1(name: str, count: int, tolerance: float, tmp_path: Path) -> None:
    """One prompt at a time, as they come: the M/D/1 queue of DistServe's equations (1) to (3)."""
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    service_s, rate = given["D"], given["R"]

    def mean_s(seconds: float) -> float:
        profile = profile_file(tmp_path, prefill=(seconds, 0.0, 0.0), decode=(0.01, 0.0, 0.0))
        found = ttfts(profile, rate=rate, count=count, seed=11)
        assert len(found) == count
        return sum(found) / count

    assert mean_s(service_s) == pytest.approx(wanted["avg_ttft"], rel=tolerance)
    assert mean_s(service_s / given["K"]) == pytest.approx(wanted["avg_ttft_intra2"], rel=tolerance)
    # Of two pipeline stages the first has the queue; the second follows it as fast.
    staged_s = mean_s(service_s / 2) + service_s / 2
    assert staged_s == pytest.approx(wanted["avg_ttft_inter2"], rel=tolerance)
    assert staged_s == pytest.approx(mean_ttft_s(service_s, rate, stages=2), rel=tolerance)


def test_fluid(tmp_path: Path) -> None:
    """Equal workers, no limits, no interference: disaggregation wins no throughput."""
    vector = KNOWN["fluid-1"]
    given, wanted = vector["inputs"], vector["expected"]
    times = {"prefill_s": given["prefill_gpu_s_per_req"], "decode_s": given["decode_gpu_s_per_req"]}
    profile = profile_file(
        tmp_path, prefill=(times["prefill_s"], 0.0, 0.0), decode=(times["decode_s"], 0.0, 0.0)
    )
    one_by_one = EngineConfig(
        max_batch_tokens=64,
        max_sequences=1,
        max_chunk_tokens=0,
        max_waiting=1_000_000,
        policy="prefill_first",
    )

    def rate(*sizes: tuple[Role, int]) -> float:
        pools = tuple(
            Pool(role=role, workers=count, profile=profile, engine=one_by_one) for role, count in sizes
        )
        router = RouterConfig(
            prefill_depth=4,
            max_running_per_worker=4,
            max_queued=1_000_000,
            queue_timeout_s=1e6,
            policy="round_robin",
        )
        config = SimulationConfig(pools=pools, router=router, transfer=Transfer(bytes_s=1e15))
        found = run(arrivals((0.0, 64, 2) for _ in range(600)), config)
        return len(found) / max(record.end_s or 0.0 for record in found)

    apart = rate((Role.PREFILL, 2), (Role.DECODE, 1))
    together = rate((Role.COLOCATED, 3))
    assert apart == pytest.approx(wanted["disagg_rps"], rel=0.01)
    assert together == pytest.approx(wanted["colocated_fluid_rps"], rel=0.01)
    assert apart <= disaggregated_rate(prefill_workers=2, decode_workers=1, **times)
    assert together <= colocated_rate(workers=3, **times)
    assert apart < together


def batches(items: Iterable[WorkItem], pool: Pool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run a pool and return what each step computed: ``(request, first token, tokens)``."""
    from twinpool.engine.engine import Engine
    from twinpool.lab.simulate.cost_runner import CostRunner

    plans: list[Any] = []
    live = CostRunner.run

    def noted(self: CostRunner, plan: Any, on_layer: Any) -> Any:
        plans.append(
            [
                (int(each.sequence.request.request_id), each.first_token, each.num_tokens)
                for each in plan.items
            ]
        )
        return live(self, plan, on_layer)

    monkeypatch.setattr(CostRunner, "run", noted)
    monkeypatch.setattr(Engine, "steady_steps", lambda self: 0)
    run(items, SimulationConfig(pools=(pool,), router=PATIENT))
    return plans


def test_orca_iteration_level_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orca (OSDI 2022): who is done leaves after the iteration, and who waits joins at once."""
    vector = KNOWN["orca-iter"]
    requests = vector["inputs"]["requests"]
    pool = Pool(
        role=Role.COLOCATED,
        workers=1,
        profile="a100-llama-3.1-8b",
        engine=EngineConfig(max_sequences=vector["inputs"]["max_batch"]),
    )
    plans = batches(arrivals((0.0, 8, each["out"]) for each in requests), pool, monkeypatch)
    names = [sorted(requests[number]["id"] for number, _, _ in plan) for plan in plans]
    assert names == vector["expected"]["batches"]


def test_sarathi_stall_free_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sarathi-Serve, Algorithm 3: decodes, then unfinished prompts, then new ones, within the budget."""
    vector = KNOWN["sarathi-1"]
    given, wanted = vector["inputs"], vector["expected"]
    num_decodes = given["running_decodes"]
    first = [(0.0, 8, 200)] * num_decodes
    later = [(1.0, tokens, 4) for tokens in given["prompts"]]
    pool = Pool(
        role=Role.COLOCATED,
        workers=1,
        profile="a100-llama-3.1-8b",
        engine=EngineConfig(max_batch_tokens=given["token_budget"], max_chunk_tokens=0),
    )
    plans = batches(arrivals([*first, *later]), pool, monkeypatch)
    mixed = [
        plan for plan in plans if any(number >= num_decodes and tokens > 1 for number, _, tokens in plan)
    ]
    seen = [
        {
            "decodes": sum(number < num_decodes for number, _, _ in plan),
            "prefill": [
                [number - num_decodes, tokens] for number, _, tokens in plan if number >= num_decodes
            ],
            "total": sum(tokens for _, _, tokens in plan),
        }
        for plan in mixed
    ]
    assert seen == wanted["iterations"]
