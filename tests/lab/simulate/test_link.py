"""A shared link: bytes queue, and layers leave when they can."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.recommend.tables import write_profile
from twinpool.core.layout import KVLayout
from twinpool.core.ports import Role
from twinpool.lab.profile.profile import Link, load_links
from twinpool.lab.record import Record
from twinpool.lab.simulate.config import Emulate, Overlap, Pool, SimulationConfig, Transfer
from twinpool.lab.simulate.link import SharedLink
from twinpool.lab.simulate.simulation import run_simulation
from twinpool.lab.simulate.transfer import Way, token_bytes
from twinpool.lab.workload.item import WorkItem

MIB = 2**20


def test_two_flows_on_one_link_take_twice_as_long_as_one() -> None:
    alone = SharedLink(1e9).burst(64 * MIB, now_s=0.0)
    link = SharedLink(1e9)
    link.burst(64 * MIB, now_s=0.0)
    assert link.burst(64 * MIB, now_s=0.0) == pytest.approx(2 * alone)
    assert link.burst(64 * MIB, now_s=10.0) == pytest.approx(10.0 + alone)


@pytest.mark.parametrize(
    ("rate", "queued", "left_s"),
    [
        (1.0, 0.0, 4.0),  # 3 bytes in 2 s on a link of one a second: 1 waits, and the last layer
        (3.0, 0.0, 2.0 + 1.0 / 3.0),  # they are gone at once, so there is only the last layer
        (1.0, 10.0, 14.0),  # all 14 bytes wait for each other
    ],
)
def test_a_flow_that_is_over_early_has_come_by_then(rate: float, queued: float, left_s: float) -> None:
    link = SharedLink(rate)
    link.burst(queued, now_s=0.0)
    flow = link.flow(3.0, start_s=0.0, end_s=6.0)

    link.hasten(flow, now_s=2.0)

    assert link.burst(1.0, now_s=2.0) == pytest.approx(left_s)
    assert link.burst(1.0, now_s=20.0) == pytest.approx(20.0 + 1.0 / rate)  # nothing comes any more


def test_a_flow_that_is_over_before_it_began_comes_at_once() -> None:
    link = SharedLink(1.0)
    flow = link.flow(3.0, start_s=4.0, end_s=10.0)

    link.hasten(flow, now_s=2.0)

    assert link.burst(0.0, now_s=2.0) == pytest.approx(5.0)
    assert link.burst(1.0, now_s=6.0) == pytest.approx(7.0)


@settings(deadline=None)
@given(
    layers=st.integers(2, 90),
    layer_s=st.floats(0.001, 1.0),
    send_s=st.floats(0.001, 1.0),
    queued_s=st.floats(0.0, 50.0),
)
def test_layers_leave_as_if_each_were_an_event(
    layers: int, layer_s: float, send_s: float, queued_s: float
) -> None:
    rate, start_s = 1000.0, 5.0
    end_s = start_s + layers * layer_s
    link = SharedLink(rate)
    link.burst(queued_s * rate, now_s=start_s)
    link.flow((layers - 1) * send_s * rate, start_s=start_s + layer_s, end_s=end_s)
    left_s = link.burst(send_s * rate, now_s=end_s)

    free_s = start_s + queued_s
    for layer in range(1, layers + 1):
        free_s = max(free_s, start_s + layer * layer_s) + send_s

    assert left_s == pytest.approx(free_s, rel=1e-9)


def test_each_worker_has_a_link_that_its_transfers_share_unless_the_tool_that_ignores_it_is_asked_for() -> (
    None
):
    """Two prefill workers send 64 MiB each to one decode worker at the same time."""

    def second_token_s(num_prefill: int, emulate: Emulate | None) -> list[float]:
        pools = (
            Pool(role=Role.PREFILL, workers=num_prefill, profile="h100-llama-3.1-8b"),
            Pool(role=Role.DECODE, workers=1, profile="h100-llama-3.1-8b"),
        )
        transfer = Transfer(bytes_s=64 * MIB, latency_s=0.0, overlap=Overlap.NONE)
        items = [
            WorkItem(index=i, arrival_s=0.0, prompt_tokens=512, output_tokens=2) for i in range(num_prefill)
        ]
        found: list[Record] = []
        run_simulation(
            items, SimulationConfig(pools=pools, transfer=transfer, emulate=emulate), on_record=found.append
        )
        return sorted(record.gaps_s[0] for record in found)

    (alone,) = second_token_s(1, None)
    assert alone == pytest.approx(1.0, abs=0.01)  # 512 tokens of 131,072 bytes at 64 MiB a second
    assert second_token_s(2, None) == pytest.approx([1.0, 2.0], abs=0.01)
    assert second_token_s(2, Emulate.SPLITWISE_SIM) == pytest.approx([1.0, 1.0], abs=0.01)


@pytest.mark.parametrize(
    ("tp", "per", "seconds"), [(1, "rank", 1.0), (1, "worker", 1.0), (2, "rank", 1.0), (2, "worker", 2.0)]
)
def test_a_worker_has_a_link_or_each_of_its_ranks_has(
    tp: int, per: str, seconds: float, tmp_path: Path
) -> None:
    """1000 tokens of 256 bytes, which every rank gets, since it keeps the only head."""
    here = {"latency_s": 0.0, "bytes_s": 256_000.0, "per": per}
    profile = write_profile(
        tmp_path, "toy", prefill=(1e-6, 0.0, 0.0), decode=(1e-6, 0.0, 0.0), tp=tp, transfers={"here": here}
    )
    pools = tuple(Pool(role=role, workers=1, profile=profile) for role in (Role.PREFILL, Role.DECODE))
    found: list[Record] = []

    run_simulation(
        [WorkItem(index=0, arrival_s=0.0, prompt_tokens=1000, output_tokens=2)],
        SimulationConfig(pools=pools, transfer=Transfer(link="here")),
        on_record=found.append,
    )

    assert found[0].gaps_s[0] == pytest.approx(seconds, abs=1e-4)


def test_links_of_gpus_are_told_from_those_of_machines() -> None:
    links = load_links()

    assert links["ib_ndr_400g"].worker_bytes_s(8) == links["dgx_h100_8x400g"].worker_bytes_s(8) == 4e11
    assert links["eth_100g"].worker_bytes_s(8) == links["eth_100g"].worker_bytes_s(1) == 1.25e10
    assert links["mooncake_8x200g"].worker_bytes_s(8) == 146028888064.0  # as it was fitted


class Ends:
    """What a transfer asks of a worker."""

    def __init__(self) -> None:
        layout = KVLayout(
            num_layers=1, num_kv_heads=1, head_dim=64, block_tokens=16, dtype="float16", tp_size=1
        )
        self.info = SimpleNamespace(layout=layout)
        self.link_in, self.link_out = SharedLink(256.0), SharedLink(256.0)  # a token a second
        self.kv_bytes_in = self.kv_bytes_out = 0


def test_bytes_that_queue_at_their_sender_take_the_receiver_as_well() -> None:
    """What docs/lab.md says is not simulated: the second transfer of ``a`` really comes to ``y`` at 1 s only.

    So that of ``b`` has the link of ``y`` to itself until then, and is there at 1 s.
    """
    a, b, x, y = (Ends() for _ in range(4))
    way = Way(Link(latency_s=0.0, bytes_s=256.0), overlap=Overlap.NONE, compact=False, is_shared=True)

    def whole_s(source: Ends, target: Ends) -> float:
        transfer = way.transfer(cast(Any, source), cast(Any, target), num_tokens=1, first_token=0)
        transfer.computes(1, start_s=-1.0, end_s=0.0)
        transfer.computed(is_last=True, now_s=0.0)
        return transfer.whole_s

    assert [whole_s(a, x), whole_s(a, y), whole_s(b, y)] == [1.0, 2.0, 2.0]


def test_heads_that_several_ranks_keep_are_sent_to_each() -> None:
    def layout(tp_size: int) -> KVLayout:
        return KVLayout(
            num_layers=94,
            num_kv_heads=4,
            head_dim=128,
            block_tokens=16,
            dtype="bfloat16",
            tp_size=tp_size,
        )

    # Qwen3-235B, TP 8 over 4 KV heads: 12.62 GB for 32,768 tokens in the Mooncake docs, not 6.31.
    assert token_bytes(layout(8), layout(8)) == 2 * 192_512
    assert token_bytes(layout(8), layout(4)) == token_bytes(layout(1), layout(2)) == 192_512
    assert 32_768 * token_bytes(layout(8), layout(8)) == pytest.approx(12.62e9, rel=1e-3)
    assert token_bytes(layout(1), layout(1), compact=True) == 94 * 2 * 4 * (128 + 4)
