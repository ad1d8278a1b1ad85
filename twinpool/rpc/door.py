"""The one place that decides whether a call is served: by its token and by its caller's certificate.

Everything is closed, known or not, but the standard health check, which probes ask without any proof.  A
token is looked at before a byte of the message is; who has no certificate of our CA does not get so far.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from twinpool.core.errors import Untrusted
from twinpool.core.security import Trust
from twinpool.core.seldom import SeldomLog
from twinpool.core.tls import Party, check_peer
from twinpool.rpc.serving import Context
from twinpool.rpc.status import abort_with
from twinpool.rpc.token import KEY, TokenCheck

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

_log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Door(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before the services of one server.

    Args:
        trust: Of this process.
        callers: Who may call.
        audience: How callers name this server; see ``rpc/token.py``.
    """

    def __init__(self, trust: Trust, *, callers: Party, audience: str) -> None:
        self.trust = trust
        self._callers = callers
        self._tokens = (
            TokenCheck(trust.secret, caller=callers, audience=audience) if trust.secret.is_set else None
        )
        self.num_refused = 0
        self._news = SeldomLog(_log, logging.WARNING)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(details)
        if details.method in OPEN_METHODS:
            return handler
        if self._tokens is not None:
            try:
                self._tokens.check(_token_in(details), details.method)
            except Untrusted as error:
                return self._refusing(error)
        return handler if self.trust.tls is None else self._for_callers(handler or _UNKNOWN)

    def _refusing(self, error: Untrusted) -> Handler:
        """Return a handler that reads nothing; on the wire it fits every kind of method."""

        async def refuse(_messages: object, context: Context) -> None:
            await self._refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _for_callers(self, handler: Handler) -> Handler:
        """Return ``handler`` behind a look at the certificate, which only the call itself can show."""
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        inner = getattr(handler, kind)

        async def checked(message: object, context: Context) -> Any:
            try:
                check_peer(context.auth_context().get("x509_subject_alternative_name", ()), self._callers)
            except Untrusted as error:
                await self._refuse(context, error)
            return await inner(message, context)

        return handler._replace(**{kind: checked})  # type: ignore[attr-defined, no-any-return]

    async def _refuse(self, context: Context, error: Untrusted) -> None:
        self.num_refused += 1
        self._news.tell("refused a call of %s: %s", context.peer(), error)
        await abort_with(context, error)


async def _unknown(_messages: object, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")


_UNKNOWN: Handler = grpc.stream_stream_rpc_method_handler(_unknown)


def _token_in(details: grpc.HandlerCallDetails) -> str | None:
    found = [value for key, value in details.invocation_metadata or () if key == KEY]
    return str(found[0]) if len(found) == 1 else None
