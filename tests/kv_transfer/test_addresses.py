"""Where a transport listens and what it tells its peers, alike for all that have a port."""

from __future__ import annotations

import socket

import pytest

from kv_transfer.addresses import joined, split, tune, where_to_listen
from kv_transfer.config import TransferConfig
from twinpool.core.errors import ConfigError


@pytest.mark.parametrize(
    ("listen", "advertise_host", "expected"),
    [
        ("", "", ("127.0.0.1:0", "127.0.0.1")),
        ("10.0.0.2:7000", "", ("10.0.0.2:7000", "10.0.0.2")),
        ("[::1]:7000", "", ("[::1]:7000", "::1")),
        ("0.0.0.0:7000", "worker-3", ("0.0.0.0:7000", "worker-3")),
        (":7000", "[fd00::2]", (":7000", "fd00::2")),
        (":7000", "fd00::2", (":7000", "fd00::2")),
        ("[fe80::1%eth0]:7000", "", ("[fe80::1%eth0]:7000", "fe80::1%eth0")),
    ],
)
def test_peers_are_told_what_is_advertised_or_else_what_is_listened_on(
    listen: str, advertise_host: str, expected: tuple[str, str]
) -> None:
    assert where_to_listen(TransferConfig(listen=listen, advertise_host=advertise_host)) == expected


@pytest.mark.parametrize("listen", [":7000", "0.0.0.0:7000", "[::]:7000"])
def test_every_address_there_is_cannot_be_told_to_peers(listen: str) -> None:
    with pytest.raises(ConfigError, match="advertise_host: needed, since no peer can connect to"):
        where_to_listen(TransferConfig(listen=listen))


def test_a_setting_that_is_no_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.listen: 10\.0\.0\.2 is not of the form HOST:PORT"):
        where_to_listen(TransferConfig(listen="10.0.0.2"))


@pytest.mark.parametrize("listen", ["::1", "::1:7000", "fd00::2:7000", "[fd00::2:7000", "[here:we]:7000"])
def test_an_ipv6_address_without_brackets_is_not_guessed_at(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.listen: .*: an IPv6 address needs brackets"):
        where_to_listen(TransferConfig(listen=listen))


@pytest.mark.parametrize("address", ["127.0.0.1:80", "[fd00::2]:65535", "worker-3:0"])
def test_an_address_is_split_and_joined_again(address: str) -> None:
    assert joined(*split(address)) == address


@pytest.mark.parametrize("address", ["", "host", "host:", "host:65536", "host:-1", "host:\u0661"])
def test_what_is_no_address_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="is not of the form HOST:PORT"):
        split(address)


def test_a_peer_that_vanished_is_noticed_within_fifteen_seconds_whether_or_not_anything_is_sent_to_it() -> (
    None
):
    with socket.socket() as end:
        tune(end)
        silent, every, times, unanswered_ms = (
            end.getsockopt(socket.IPPROTO_TCP, name)
            for name in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )

        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert silent + every * times <= 15
        assert unanswered_ms == 15_000
