"""TorchRankGroup: sums that are equal everywhere, groups side by side, ports that strangers cannot harm."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import psutil
import pytest
import torch

from tests.engine.ranks import SECRET
from twinpool.core.errors import ConfigError, RankLost
from twinpool.core.secret import Secret
from twinpool.engine.parallel import GroupConfig, RankGroup, SingleRank
from twinpool.engine.rank_links import address_of, admit, listen, reach
from twinpool.engine.torch_group import join_group, lead_group, tcp_store

ANSWER_S = 30.0
T = TypeVar("T")


def everywhere(*actions: Callable[[], T]) -> list[T]:
    """Run each rank's action in a thread of its own."""
    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(ANSWER_S) for future in [pool.submit(action) for action in actions]]


@contextmanager
def grouped(size: int, *, host: str = "127.0.0.1") -> Iterator[list[RankGroup]]:
    """Give all ranks of a group, in one process."""
    config = GroupConfig(size=size, secret=SECRET, step_timeout_s=ANSWER_S, start_timeout_s=ANSWER_S)
    listener = listen(host)
    address = address_of(listener)
    groups = everywhere(
        lambda: lead_group(listener, config),
        *(lambda rank=rank: join_group(address, config, rank=rank) for rank in range(1, size)),
    )
    yield groups
    for group in groups:
        group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_is_the_same_to_the_last_bit_on_every_rank(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    with grouped(size) as groups:
        for shape in [(1, 1), (3, 7), (5, 64), (1, 1000), (130, 33)]:
            parts = [torch.randn(shape).to(dtype) for _ in range(size)]
            expected = torch.stack([part.double() for part in parts]).sum(0)

            sums = everywhere(
                *(
                    lambda group=group, part=part: group.all_reduce(part.clone())
                    for group, part in zip(groups, parts, strict=True)
                )
            )

            assert all(torch.equal(one, sums[0]) for one in sums)
            near = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
            torch.testing.assert_close(sums[0].double(), expected, atol=near, rtol=0.0)


def test_rank_0_alone_gathers() -> None:
    with grouped(3) as groups:
        parts = everywhere(
            *(lambda group=group: group.gather(torch.full((2, 2), float(group.rank))) for group in groups)
        )

    assert [len(one) for one in parts] == [3, 0, 0]
    assert [part.tolist() for part in parts[0]] == [[[float(n)] * 2] * 2 for n in range(3)]


def test_the_smallest_value_is_known_to_all() -> None:
    with grouped(3) as groups:
        values = everywhere(*(lambda group=group: group.minimum(10 - group.rank) for group in groups))

    assert values == [8, 8, 8]


def test_two_groups_in_the_same_processes_do_not_mix() -> None:
    with grouped(2) as ones, grouped(2) as others:
        sums = everywhere(
            *(lambda group=group: group.all_reduce(torch.tensor([1.0])) for group in ones),
            *(lambda group=group: group.all_reduce(torch.tensor([10.0])) for group in others),
        )

    assert [one.item() for one in sums] == [2.0, 2.0, 20.0, 20.0]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_port_of_a_group_is_open_to_others_and_strangers_do_no_harm_at_those_that_are(host: str) -> None:
    before = listening()
    with grouped(2, host=host) as groups:
        ports = listening() - before
        assert ports  # gloo's own
        assert {at for at, _ in ports} == {host}

        for _, port in ports:
            for words in (b"", b"\x00", os.urandom(4096), bytes(65536), b"GET / HTTP/1.1\r\n\r\n"):
                with socket.create_connection((host, port)) as stranger:
                    stranger.sendall(words)

        sums = everywhere(*(lambda group=group: group.all_reduce(torch.tensor([1.0])) for group in groups))
        assert [one.item() for one in sums] == [2.0, 2.0]


def test_strangers_at_every_port_while_ranks_meet_do_no_harm() -> None:
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.is_set():
            for host, port in listening():
                try:
                    with socket.create_connection((host, port), timeout=1.0) as stranger:
                        stranger.sendall(os.urandom(64))
                except OSError:
                    continue

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb)
        try:
            for _ in range(5):
                with grouped(3) as groups:
                    sums = everywhere(*(lambda g=group: g.all_reduce(torch.ones(4)) for group in groups))
                assert [one.tolist() for one in sums] == [[3.0] * 4] * 3
        finally:
            is_over.set()
            disturbing.result(ANSWER_S)


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_torchs_own_store_listens_at_the_address_of_rank_0_only() -> None:
    before = listening()
    listener = listen("127.0.0.1")
    address = address_of(listener)
    links = everywhere(
        lambda: admit(listener, size=2, secret=SECRET, timeout_s=ANSWER_S),
        lambda: reach(address, rank=1, size=2, secret=SECRET, timeout_s=ANSWER_S),
    )

    one, other = everywhere(*(lambda end=end: tcp_store(end, timeout_s=ANSWER_S) for end in links))

    assert {host for host, _ in listening() - before} == {"127.0.0.1"}
    one.set("key", "value")
    assert other.get("key") == b"value"
    for end in links:
        end.close()


def test_what_fails_in_a_step_leaves_no_other_rank_waiting() -> None:
    def fail(group: RankGroup) -> str:
        with pytest.raises(RankLost, match="the step failed on rank 1: own fault"), group.step():
            raise ValueError("own fault")
        return "failed"

    def wait(group: RankGroup) -> str:
        with pytest.raises(RankLost) as caught, group.step():
            group.all_reduce(torch.ones(3))
        return str(caught.value)

    with grouped(3) as groups:
        ended = everywhere(lambda: wait(groups[0]), lambda: fail(groups[1]), lambda: wait(groups[2]))

        assert ended[1] == "failed"
        assert ended[0].startswith("the step failed on rank 0: ")
        with pytest.raises(RankLost):
            groups[0].send_plan(b"another")
        with pytest.raises(RankLost):
            groups[2].next_plan()


def test_a_plan_that_cannot_be_delivered_breaks_the_group() -> None:
    with grouped(3) as groups:
        groups[1].close()
        everywhere(lambda: _sends_until_lost(groups[0]))

        with pytest.raises(RankLost, match="rank 0 is gone"):
            while groups[2].next_plan() is not None:
                pass


def _sends_until_lost(group: RankGroup) -> None:
    with pytest.raises(RankLost, match="rank 1 is gone"):
        for _ in range(1000):
            group.send_plan(bytes(100_000))


def test_closing_rank_0_ends_the_wait_of_the_others_and_closing_another_its_own() -> None:
    with grouped(3) as groups, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(group.next_plan) for group in groups[1:]]
        groups[2].close()
        assert waiting[1].result(ANSWER_S) is None
        assert not waiting[0].done()

        groups[0].close()

        assert waiting[0].result(ANSWER_S) is None


def test_a_group_of_one_needs_nobody() -> None:
    listener = listen("127.0.0.1")
    group = lead_group(listener, GroupConfig(size=1, secret=Secret()))
    tensor = torch.ones(3)

    assert isinstance(group, SingleRank)
    assert group.all_reduce(tensor) is tensor
    assert group.gather(tensor)[0] is tensor
    assert (group.minimum(7), group.exchange(b"x"), group.next_plan()) == (7, (b"x",), None)
    assert listener.fileno() == -1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "tensor_parallel: 0 is less than 1"),
        ({"step_timeout_s": 0.0}, "tensor_parallel.step_timeout_s: 0 is not above 0"),
        ({"start_timeout_s": -1.0}, "tensor_parallel.start_timeout_s: -1 is not above 0"),
    ],
)
def test_sizes_and_times_that_make_no_sense_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        GroupConfig(**{"size": 2, "secret": Secret(), **fields})  # type: ignore[arg-type]
