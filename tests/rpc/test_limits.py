"""What gRPC is told: it ignores a name that it does not know."""

from __future__ import annotations

from pathlib import Path

from grpc._cython import cygrpc

from twinpool.rpc.limits import channel_options, server_options


def test_every_option_is_one_that_this_grpc_knows() -> None:
    library = Path(cygrpc.__file__).read_bytes()
    sizes = {"max_receive_bytes": 1, "max_send_bytes": 1}

    for name, _ in (*server_options(**sizes), *channel_options(**sizes)):
        assert name.encode() + b"\0" in library, name
