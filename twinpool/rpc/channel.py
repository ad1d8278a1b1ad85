"""A connection on which every call shows who makes it, and which knows whom it has reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.rpc.limits import Options
from twinpool.rpc.token import KEY, make_token

# What gRPC says of a connection that was not made, and what that means.
_MEANINGS = (
    ("WRONG_VERSION_NUMBER", "it speaks no TLS, or there is something else"),
    ("Hostname Verification", "its certificate is for another party"),
    ("certificate has expired", "its certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate was not signed by our tls_ca"),
)
_HUNG_UP = ("Socket closed", "Connection reset")


class TrustedChannel:
    """A ``grpc.aio.Channel`` as far as generated stubs use one.

    Args:
        address: ``host:port``.
        trust: Of this process.
        to: Who must be there.
        audience: How the server there is named in tokens; see ``rpc/token.py``.
        options: Of the channel.
    """

    def __init__(self, address: str, *, trust: Trust, to: Party, audience: str, options: Options) -> None:
        self._trust = trust
        self._audience = audience
        target = f"dns:///{address}"  # whatever gRPC would make of the address otherwise: a path, a list
        if trust.tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
            return
        credentials = grpc.ssl_channel_credentials(
            root_certificates=trust.tls.ca, private_key=trust.tls.key, certificate_chain=trust.tls.cert
        )
        named = (*options, ("grpc.ssl_target_name_override", to.dns_name))
        self._channel = grpc.aio.secure_channel(target, credentials, options=named)

    async def __aenter__(self) -> TrustedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every call at once."""
        await self._channel.close(grace=None)

    def explain(self, detail: str) -> str:
        """Return ``detail``, gRPC's reason for not reaching the server, and what it says about trust."""
        if "failed to connect" not in detail:
            return detail
        tls = self._trust.tls
        hung_up = "it may want TLS" if tls is None else "it may not trust our certificate; its log says why"
        for sign, meaning in (*_MEANINGS, *((sign, hung_up) for sign in _HUNG_UP)):
            if sign in detail:
                return f"{meaning} ({detail})"
        return detail

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._with_token(self._channel.unary_unary(method, *args, **kwargs), method)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._with_token(self._channel.unary_stream(method, *args, **kwargs), method)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._with_token(self._channel.stream_unary(method, *args, **kwargs), method)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._with_token(self._channel.stream_stream(method, *args, **kwargs), method)

    def _with_token(self, start_call: Callable[..., Any], method: str) -> Callable[..., Any]:
        if not self._trust.secret.is_set:
            return start_call

        def start(*args: Any, **kwargs: Any) -> Any:
            token = make_token(
                self._trust.secret,
                caller=self._trust.party,
                audience=self._audience,
                method=method,
                unix_s=time.time(),
            )
            return start_call(*args, metadata=((KEY, token),), **kwargs)

        return start
