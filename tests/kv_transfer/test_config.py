"""TransferConfig and the registry: what cannot work is said at the start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.registry import load_transport, transport_names, unavailable
from twinpool.core.errors import ConfigError

USABLE = [name for name in transport_names() if not unavailable(name)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lease_s": 0.0}, "transfer.lease_s: 0.0 is less than 0.1"),
        ({"lease_s": 0.0001}, "transfer.lease_s: 0.0001 is less than 0.1"),
        ({"connect_timeout_s": -1.0}, "transfer.connect_timeout_s: -1.0 is less than 0.1"),
        ({"message_bytes": 0}, "transfer.message_bytes: 0 is less than 1"),
        ({"whole_below_tokens": -1}, "transfer.whole_below_tokens: -1 is less than 0"),
        ({"transports": ("tcp", "grpc", "tcp")}, "transfer.transports: tcp stands there twice"),
        ({"advertise_host": "10.0.0.7:80"}, "transfer.advertise_host: '10.0.0.7:80' is no name or address"),
        ({"advertise_host": "a b"}, "transfer.advertise_host: 'a b' is no name or address"),
        ({"message_bytes": 8 * 2**20}, "transfer.message_bytes: 8388608 is more than 7340032"),
        ({"credit_bytes": 2**64}, f"transfer.credit_bytes: {2**64} is more than {2**40}"),
        ({"credit_bytes": 1000}, "transfer.credit_bytes: 1000 is less than one message of 2097152"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransferConfig(**settings)


@pytest.mark.parametrize("host", ["", "10.0.0.7", "::1", "[::1]", "fe80::1%eth0", "decode-0.twinpool.svc"])
def test_a_host_to_advertise_is_a_name_or_an_address(host: str) -> None:
    assert TransferConfig(advertise_host=host).advertise_host == host


def test_an_unknown_transport_is_refused_with_the_list_of_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"carrier_pigeon is none of .*grpc, loopback"):
        load_transport("carrier_pigeon", TransferConfig())


def test_every_transport_names_itself_in_its_endpoint() -> None:
    async def scenario() -> dict[str, str]:
        named = {}
        for name in USABLE:
            transport = load_transport(name, TransferConfig())
            named[name] = transport.endpoint.transport
            await transport.close()
        return named

    assert asyncio.run(scenario()) == {name: name for name in USABLE}


@pytest.mark.parametrize("name", USABLE)
def test_two_workers_cannot_listen_at_one_address(name: str) -> None:
    async def scenario() -> None:
        hub = Hub()
        first = load_transport(name, TransferConfig(), hub)
        try:
            with pytest.raises(ConfigError, match=r"transfer.listen: .*" + first.endpoint.address):
                load_transport(name, TransferConfig(listen=first.endpoint.address), hub)
        finally:
            await first.close()

    asyncio.run(scenario())


def test_a_wildcard_address_needs_a_host_that_peers_can_connect_to() -> None:
    async def scenario() -> str:
        with pytest.raises(ConfigError, match=r"transfer.advertise_host: needed"):
            load_transport("grpc", TransferConfig(listen="0.0.0.0:0"))
        transport = load_transport("grpc", TransferConfig(listen="0.0.0.0:0", advertise_host="10.0.0.7"))
        await transport.close()
        return transport.endpoint.address.partition(":")[0]

    assert asyncio.run(scenario()) == "10.0.0.7"
