"""Which transports a worker's process may be told to use."""

from __future__ import annotations

import pytest

from kv_transfer.registry import check_between_processes, chosen_transports
from twinpool.core.errors import ConfigError

PROBLEMS = {
    "loopback": "^transfer.transports: loopback reaches no other process",
    "carrier_pigeon": "^transfer.transports: carrier_pigeon is none of",
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_transport_that_leads_to_no_other_worker_is_refused_by_name(name: str) -> None:
    for check in (check_between_processes, chosen_transports):
        with pytest.raises(ConfigError, match=PROBLEMS[name]):
            check(("tcp", name))


def test_what_is_named_is_used_in_that_order() -> None:
    assert chosen_transports(("grpc", "tcp")) == ("grpc", "tcp")
    assert "loopback" not in chosen_transports(())
