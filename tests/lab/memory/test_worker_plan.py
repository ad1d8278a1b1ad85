"""A plan adds up, fits or says what to cut, and knows how much it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.config import TransferConfig
from tests.lab.memory.configs import CONFIGS, LLAMA_31_8B
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.lab.memory.bytes_text import bytes_text
from twinpool.lab.memory.cache_format import FORMATS
from twinpool.lab.memory.capacity import Capacity
from twinpool.lab.memory.cuts import find_cuts
from twinpool.lab.memory.memory_plan import plan_memory
from twinpool.lab.memory.planned_model import model_of
from twinpool.lab.memory.term import Kind, TermName
from twinpool.lab.memory.worker_plan import HeldLoad, WorkerShape, plan_worker

MODEL = model_of(LLAMA_31_8B)
WEIGHTS = 16_060_522_496
BLOCK = 16 * 131072


def worker(**settings: Any) -> WorkerShape:
    return WorkerShape(**{"role": Role.DECODE, "memory_bytes": 80 * 2**30, "num_peers": 2, **settings})


def test_the_parts_add_up_and_leave_less_than_a_block() -> None:
    plan = plan_worker(MODEL, worker())

    assert [term.name for term in plan.terms] == list(TermName)
    assert plan.term(TermName.WEIGHTS).num_bytes == WEIGHTS
    assert plan.total_bytes == sum(term.num_bytes for term in plan.terms)
    assert plan.fits
    more = replace(plan.worker, cache_bytes=plan.capacity.cache_bytes + BLOCK)
    assert not plan_worker(MODEL, more).fits


def test_a_cache_of_a_told_size_is_cut_to_whole_blocks() -> None:
    plan = plan_worker(MODEL, worker(cache_bytes=10 * BLOCK + 1))

    assert plan.term(TermName.CACHE).num_bytes == 10 * BLOCK
    assert (plan.num_blocks, plan.capacity.num_tokens) == (10, 160)
    assert plan.term(TermName.CACHE).kind is Kind.EXACT


def test_a_cache_of_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"--kv-memory: {BLOCK} bytes hold less than 2 blocks of {BLOCK}"):
        plan_worker(MODEL, worker(cache_bytes=BLOCK))


def test_a_load_that_fits_takes_what_it_needs() -> None:
    plan = plan_worker(MODEL, worker(load=HeldLoad(num_tokens=8192, num_conversations=32)))

    assert plan.term(TermName.CACHE).num_bytes == 32 * 2**30  # 1 GiB each: 8192 x 128 KiB
    assert plan.capacity.conversations(8192) == 32
    assert plan.capacity.longest(num_conversations=32) == 8192
    assert plan.fits


def test_a_load_that_does_not_fit_says_by_how_much_and_what_would_help() -> None:
    plan = plan_worker(MODEL, worker(load=HeldLoad(num_tokens=8192, num_conversations=96)))
    cuts = find_cuts(MODEL, plan)

    assert plan.missing_bytes == plan.total_bytes - 80 * 2**30 > 0
    enough = [cut for cut in cuts if cut.is_enough]
    assert cuts[: len(enough)] == tuple(enough)
    assert {cut.term for cut in enough} == {TermName.CACHE, TermName.WEIGHTS}
    fewer = next(cut for cut in enough if "conversations instead" in cut.change)
    number = int(fewer.change.split()[0])
    assert plan_worker(MODEL, worker(load=HeldLoad(num_tokens=8192, num_conversations=number))).fits
    assert not plan_worker(MODEL, worker(load=HeldLoad(num_tokens=8192, num_conversations=number + 1))).fits
    changed = plan_worker(MODEL, worker(load=HeldLoad(num_tokens=8192, num_conversations=number)))
    assert fewer.saved_bytes == plan.total_bytes - changed.total_bytes >= (96 - number) * 2**30
    ranks = next(cut for cut in enough if cut.term is TermName.WEIGHTS)
    assert ranks.change == "2 ranks instead of 1"
    assert all(cut.saved_bytes < plan.missing_bytes for cut in cuts[len(enough) :])


def test_weights_that_do_not_fit_are_told_to_be_shared() -> None:
    plan = plan_worker(MODEL, worker(memory_bytes=12 * 2**30))

    assert not plan.fits
    assert [cut.change for cut in find_cuts(MODEL, plan) if cut.is_enough] == ["2 ranks instead of 1"]


def test_a_cache_that_was_told_too_small_is_told_to_grow() -> None:
    load = HeldLoad(num_tokens=8192, num_conversations=3)
    plan = plan_worker(MODEL, worker(cache_bytes=2 * 2**30, load=load))

    assert plan.missing_bytes == 2**30
    cuts = find_cuts(MODEL, plan)
    grow = next(cut for cut in cuts if cut.change.startswith("a KV cache of"))
    assert grow.change == f"a KV cache of {3 * 2**30} bytes on each rank instead of {2 * 2**30}"
    assert grow.is_enough
    assert any(cut.change == "2 conversations instead of 3" for cut in cuts)


def test_a_cache_that_was_told_too_large_is_told_to_shrink() -> None:
    plan = plan_worker(MODEL, worker(cache_bytes=100 * 2**30))

    (shrink,) = [cut for cut in find_cuts(MODEL, plan) if cut.change.startswith("a KV cache of")]
    assert shrink.is_enough
    size = int(shrink.change.split()[4])
    assert plan_worker(MODEL, worker(cache_bytes=size)).fits


def test_a_plan_that_fits_has_nothing_to_cut() -> None:
    assert find_cuts(MODEL, plan_worker(MODEL, worker())) == ()


def test_more_decode_workers_cost_a_prefill_worker_their_lines() -> None:
    """shm: 16 MiB of credit in messages of 2 MiB are 8 slots, and 8 more rest."""
    cpu = worker(is_gpu=False, role=Role.PREFILL)
    one, three = (plan_worker(MODEL, replace(cpu, num_peers=number)) for number in (1, 3))

    assert one.term(TermName.PEERS).num_bytes == 16 * 2 * 2**20
    assert three.term(TermName.PEERS).num_bytes == 3 * 16 * 2 * 2**20
    assert one.term(TermName.PEERS).kind is Kind.BOUND


@pytest.mark.parametrize(
    ("role", "transfer", "staging", "peers"),
    [
        (Role.COLOCATED, {}, 0, 0),
        (Role.DECODE, {"transports": ("tcp",)}, (64 + 4) * 2 * 2**20, 0),
        (Role.PREFILL, {"transports": ("tcp",)}, 0, 0),
        (Role.DECODE, {"transports": ("grpc",)}, 64 * 16 * 2**20, 0),
        (Role.DECODE, {"transports": ("torch_dist",)}, 0, 2 * 3 * 8 * 2**20),
        (Role.DECODE, {"compact": True}, 64 * 2 * 2**20, 2 * 16 * 2 * 2**20),
    ],
)
def test_buffers_are_those_of_the_transport(
    role: Role, transfer: dict[str, Any], staging: int, peers: int
) -> None:
    num_peers = 0 if role is Role.COLOCATED else 2
    shape = worker(role=role, is_gpu=False, num_peers=num_peers, transfer=TransferConfig(**transfer))

    plan = plan_worker(MODEL, shape)

    assert plan.term(TermName.STAGING).num_bytes == staging
    assert plan.term(TermName.PEERS).num_bytes == peers


def test_nccl_is_called_an_estimate() -> None:
    """vLLM's P2pNccl: about 52 MB for a pair with 8 channels."""
    term = plan_worker(MODEL, worker(transfer=TransferConfig(transports=("torch_dist",)))).term(
        TermName.PEERS
    )

    assert term.num_bytes == 2 * (3 * 8 * 2**20 + 52 * 10**6)
    assert term.kind is Kind.ESTIMATE


def test_a_transport_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.transports: pigeon is none of"):
        plan_worker(MODEL, worker(transfer=TransferConfig(transports=("pigeon",))))


def test_states_limit_how_many_conversations_fit_and_not_how_long_they_are() -> None:
    """mamba-2.8b keeps 22,937,600 bytes of each."""
    model = model_of(CONFIGS["mamba-2.8b"])
    plan = plan_worker(model, worker(cache_bytes=10 * 22_937_600))

    assert plan.capacity.conversations(1) == plan.capacity.conversations(10**6) == 10
    assert plan.capacity.num_tokens is None
    assert plan.num_blocks is None


def test_our_engine_keeps_what_a_window_hides_and_the_plan_says_so() -> None:
    made = plan_memory(model_of(CONFIGS["Mistral-7B-v0.1"]), [worker()], contexts=[32768])

    (row,) = made.table(made.workers[0])
    assert row[0].num_bytes == 32768 * 131072
    assert "32,768 tokens would take 514 MiB instead of 4.00 GiB" in made.notes()[0]


def test_the_table_is_context_by_conversations() -> None:
    made = plan_memory(MODEL, [worker(cache_bytes=2**30)], contexts=[1000, 8192], conversations=[1, 2])

    cells = [[(cell.num_bytes, cell.fits) for cell in row] for row in made.table(made.workers[0])]

    kilo = 63 * BLOCK  # 1000 tokens are 63 blocks
    assert cells == [[(kilo, True), (2 * kilo, True)], [(2**30, True), (2**31, False)]]


def test_a_quantised_cache_pays_its_scales_once() -> None:
    plan = plan_worker(MODEL, worker(cache_form=FORMATS["fp8"], cache_bytes=2**30))

    assert plan.capacity.needed_bytes(16, 1) == 16 * 65536 + 256


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"memory_bytes": 0}, "memory_bytes: 0 is less than 1"),
        ({"num_peers": -1}, "num_peers: -1 is less than 0"),
        ({"num_ranks": 0}, "num_ranks: 0 is less than 1"),
        ({"reserve_bytes": -5}, "reserve_bytes: -5 is less than 0"),
        ({"dtype": "float8"}, "dtype: 'float8' is none of float32, bfloat16, float16"),
    ],
)
def test_a_worker_that_cannot_be_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        worker(**settings)


@pytest.mark.parametrize("field", ["num_tokens", "num_conversations"])
def test_an_empty_load_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"load\.{field}: 0 is less than 1"):
        HeldLoad(**{"num_tokens": 1, "num_conversations": 1, field: 0})


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (512 * 2**20, "512 MiB"), (80 * 10**9, "74.5 GiB")],
)
def test_sizes_are_written_with_three_digits(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_an_empty_cache_holds_nothing() -> None:
    plan = plan_worker(MODEL, worker())
    empty = Capacity(shape=plan.capacity.shape, settings=plan.capacity.settings, cache_bytes=0)

    assert (empty.num_tokens, empty.conversations(1)) == (0, 0)
