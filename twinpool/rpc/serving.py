"""What every server of ours does the same way: bind an address, and keep an error inside its call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from twinpool.core.errors import ConfigError, InternalError, ServingError
from twinpool.core.security import Trust
from twinpool.rpc.status import abort_with

EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]  # what a read gives when the peer has said all
Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)


def bind(server: grpc.aio.Server, host: str, port: int, trust: Trust, *, option: str = "--port") -> int:
    """Bind ``server`` and return the port; with certificates it speaks TLS to those who have one themselves.

    Args:
        server: Not started yet.
        host: Of this machine.
        port: 0 takes a free one.
        trust: Of this process.
        option: Named in the error.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    address = join_address(host, port)
    try:
        if trust.tls is None:
            return server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [(trust.tls.key, trust.tls.cert)], root_certificates=trust.tls.ca, require_client_auth=True
        )
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(option, f"{address} cannot be listened on; is it taken?") from error


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@asynccontextmanager
async def one_call(context: Context) -> AsyncIterator[None]:
    """Turn what a call raises into its status: nothing gets past the call it belongs to."""
    try:
        yield
    except ServingError as error:
        await abort_with(context, error)
    except grpc.aio.InternalError:  # a write to a peer that is gone; gRPC cancels the call as well
        raise asyncio.CancelledError from None
    except Exception as error:  # noqa: BLE001 - the top of one call
        _log.exception("a call failed")
        await abort_with(context, InternalError(f"the worker failed with {type(error).__name__}"))
