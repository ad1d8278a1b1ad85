"""RankLinks: who may come in, what is said, and how each side notices that the other is gone."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from twinpool.core.errors import ConfigError, RankLost, Untrusted
from twinpool.core.secret import Secret
from twinpool.engine.rank_links import RankLinks, address_of, admit, listen, reach

SECRET = Secret(b"what all ranks know")
START_S = 20.0


class Door:
    """Rank 0 while it waits for the others, in a thread."""

    def __init__(self, *, size: int, timeout_s: float = START_S, host: str = "127.0.0.1") -> None:
        self.listener = listen(host)
        self.port: int = self.listener.getsockname()[1]
        self.address = address_of(self.listener)
        self.size = size
        self._pool = ThreadPoolExecutor(8)
        self._led = self._do(lambda: admit(self.listener, size=size, secret=SECRET, timeout_s=timeout_s))

    def _do(self, action: Callable[[], RankLinks]) -> Future[RankLinks]:
        return self._pool.submit(action)

    def join(self, rank: int, *, secret: Secret = SECRET, size: int | None = None) -> Future[RankLinks]:
        return self._do(
            lambda: reach(self.address, rank=rank, size=size or self.size, secret=secret, timeout_s=START_S)
        )

    def led(self) -> RankLinks:
        return self._led.result(START_S)

    def all_in(self) -> list[RankLinks]:
        """Let the others in, the last rank first."""
        others = [self.join(rank) for rank in range(self.size - 1, 0, -1)]
        return [self.led(), *(other.result(START_S) for other in reversed(others))]


def together(*actions: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(START_S) for future in [pool.submit(action) for action in actions]]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_each_rank_gets_what_all_brought_in_the_order_of_ranks(host: str) -> None:
    links = Door(size=4, host=host).all_in()

    brought = together(
        *(lambda one=one, n=n: one.exchange(b"x" * n, timeout_s=5.0) for n, one in enumerate(links))
    )

    assert brought == [(b"", b"x", b"xx", b"xxx")] * 4
    assert [one.host for one in links] == [host] * 4


def test_the_port_is_open_at_its_address_only_and_until_all_are_in() -> None:
    door = Door(size=2)

    assert ("127.0.0.1", door.port) in listening()
    assert not any(port == door.port and host != "127.0.0.1" for host, port in listening())
    door.all_in()
    assert door.port not in {port for _, port in listening()}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", door.port))


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_ranks_do_not_meet_at_all_addresses(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host: ranks meet at one address, '{host}' stands for all"):
        listen(host)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host: ranks cannot meet at '192\.0\.2\.1'"):
        listen("192.0.2.1")


@pytest.mark.parametrize(
    ("rank", "size", "secret"),
    [
        (1, 2, Secret(b"what nobody here knows")),
        (1, 2, Secret()),
        (2, 2, SECRET),
        (0, 2, SECRET),
        (1, 3, SECRET),
    ],
)
def test_who_does_not_belong_is_refused_and_the_rank_that_does_is_let_in(
    rank: int, size: int, secret: Secret
) -> None:
    door = Door(size=2)

    with pytest.raises(Untrusted, match=rf"does not take this for rank {rank} of {size}"):
        door.join(rank, size=size, secret=secret).result(START_S)

    assert len(door.all_in()) == 2


def test_a_listener_that_does_not_know_the_secret_learns_nothing_and_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(
            lambda: reach(
                f"127.0.0.1:{impostor.getsockname()[1]}", rank=1, size=2, secret=SECRET, timeout_s=START_S
            )
        )
        connected, _ = impostor.accept()
        connected.sendall(bytes(32))
        hello = connected.recv(1000)
        connected.sendall(hello[-32:])  # its own proof, sent back

        with pytest.raises(Untrusted, match="is not rank 0 of this worker"):
            joining.result(START_S)
        connected.close()


def test_a_proof_that_was_overheard_is_worth_nothing() -> None:
    door = Door(size=2)
    overheard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between, ThreadPoolExecutor(1) as pool:
        passing = pool.submit(_pass_on_first_answer, between, door.port, overheard)
        with pytest.raises((Untrusted, RankLost)):
            reach(f"127.0.0.1:{between.getsockname()[1]}", rank=1, size=2, secret=SECRET, timeout_s=2.0)
        passing.result(START_S)
    assert len(overheard) == 72

    with socket.create_connection(("127.0.0.1", door.port)) as thief:
        thief.settimeout(START_S)
        thief.recv(32)
        thief.sendall(bytes(overheard))
        assert thief.recv(32) == b""

    assert len(door.all_in()) == 2


def _pass_on_first_answer(between: socket.socket, port: int, overheard: bytearray) -> None:
    """Show a rank the greeting of rank 0, keep the rank's answer, and let neither hear more."""
    rank, _ = between.accept()
    with rank, socket.create_connection(("127.0.0.1", port)) as rank_0:
        rank.sendall(rank_0.recv(32))
        overheard.extend(rank.recv(1000))


def test_strangers_delay_nobody() -> None:
    door = Door(size=3)
    strangers = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(100)]
    for number, stranger in enumerate(strangers):
        if number % 3:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50 if number % 3 == 1 else bytes(3))

    began_s = time.monotonic()
    links = door.all_in()

    assert len(links) == 3
    assert time.monotonic() - began_s < START_S
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_is_there_already_does_not_come_twice() -> None:
    door = Door(size=3)
    first, second = door.join(1).result(START_S), door.join(1).result(START_S)
    third = door.join(2).result(START_S)
    led = door.led()

    led.send(b"plan", timeout_s=5.0)

    assert (first.receive(timeout_s=5.0), third.receive(timeout_s=5.0)) == (b"plan", b"plan")
    with pytest.raises(RankLost, match="rank 0 is gone"):
        second.receive(timeout_s=5.0)


def test_ranks_that_do_not_come_are_named() -> None:
    door = Door(size=4, timeout_s=0.5)
    door.join(2).result(START_S)

    with pytest.raises(RankLost, match=r"of 4 ranks 1, 3 did not come within 0\.5 s"):
        door.led()


def test_a_rank_0_that_is_not_there_is_not_waited_for_longer_than_told() -> None:
    listener = listen("127.0.0.1")
    address = address_of(listener)
    listener.close()

    with pytest.raises(RankLost, match=f"rank 0 does not answer at {address}: "):
        reach(address, rank=1, size=2, secret=SECRET, timeout_s=0.5)


def test_a_rank_finds_rank_0_that_is_slow_to_open_its_door() -> None:
    listener = listen("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(
            lambda: reach(address_of(listener), rank=1, size=2, secret=SECRET, timeout_s=START_S)
        )
        time.sleep(0.3)
        led = admit(listener, size=2, secret=SECRET, timeout_s=START_S)

        assert (led.rank, joining.result(START_S).rank) == (0, 1)


def test_who_does_not_bring_anything_in_time_is_named() -> None:
    led, first, second = Door(size=3).all_in()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: first.exchange(b"here", timeout_s=3.0))
        with pytest.raises(RankLost, match="rank 2 is gone: it did not answer in time"):
            led.exchange(b"", timeout_s=0.5)
        led.close()
        with pytest.raises(RankLost, match="rank 0 is gone"):
            other.result(START_S)
    second.close()


def test_a_long_wait_for_the_next_plan_ends_with_the_plan_or_the_end() -> None:
    led, first, second = Door(size=3).all_in()

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(one.receive, timeout_s=None) for one in (first, second)]
        time.sleep(0.2)
        led.send(b"plan", timeout_s=5.0)
        assert [future.result(START_S) for future in waiting] == [b"plan", b"plan"]

        waiting = [pool.submit(one.receive, timeout_s=None) for one in (first, second)]
        second.close()  # its own wait
        assert waiting[1].result(START_S) is None
        led.close(last_words=b"end")
        assert waiting[0].result(START_S) == b"end"


def test_a_peer_that_breaks_off_without_a_word_is_lost() -> None:
    led, first = Door(size=2).all_in()

    led.close()

    with pytest.raises(RankLost, match="rank 0 is gone: the connection was closed"):
        first.receive(timeout_s=None)


def test_a_message_of_absurd_length_is_not_waited_for() -> None:
    led, first = Door(size=2).all_in()

    led._sockets[0].sendall(struct.pack("<Q", 2**62))

    with pytest.raises(RankLost, match=f"rank 0 is gone: a message of {2**62} bytes"):
        first.receive(timeout_s=5.0)


def test_a_peer_that_takes_nothing_is_lost_in_time() -> None:
    led, _ = Door(size=2).all_in()

    with pytest.raises(RankLost, match="rank 1 is gone: it did not answer in time"):
        led.send(bytes(2**26), timeout_s=0.5)
