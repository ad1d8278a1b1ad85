"""What a call shows: its caller holds the secret and means this method of this callee, now, and once.

    authorization: twinpool UNIX_SECONDS.NONCE.HMAC-SHA256

Who overhears a token can use it neither elsewhere nor again.  Who can also hold back and change what is on
its way is kept out by TLS alone: the token does not cover the message.  Knows no gRPC.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable

from twinpool.core.errors import Untrusted
from twinpool.core.secret import Secret
from twinpool.core.tls import Party

KEY = "authorization"  # of the metadata
REGISTRY = "registry"  # the audience of those who join a router
WINDOW_S = 60  # clocks of two machines may differ by so much
_FORM = re.compile(r"twinpool ([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)
_FIELD = "security.secret_file"


def make_token(secret: Secret, *, caller: Party, audience: str, method: str, unix_s: float) -> str:
    """Return a token for one call.

    Args:
        secret: Of the deployment.
        caller: Who calls.
        audience: Who is called: a worker's id, or ``registry``.
        method: As gRPC spells it, ``/package.Service/Method``.
        unix_s: The time.
    """
    stamp, nonce = str(int(unix_s)), secrets.token_hex(16)
    return (
        f"twinpool {stamp}.{nonce}.{secret.sign('call', caller.value, audience, method, stamp, nonce).hex()}"
    )


class TokenCheck:
    """Checks the tokens of calls to one callee.

    Args:
        secret: Of the deployment.
        caller: Who may call; a token of another party has another signature.
        audience: Who is called.
        unix_s: Tells the time.
        now_s: Tells how time passes, also when somebody sets the clock.
    """

    def __init__(
        self,
        secret: Secret,
        *,
        caller: Party,
        audience: str,
        unix_s: Callable[[], float] = time.time,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = secret
        self._caller = caller
        self._audience = audience
        self._unix_s = unix_s
        self._now_s = now_s
        # When each nonce came, oldest first.  Only holders of the secret get any in here.
        self._seen: dict[str, float] = {}

    def check(self, token: str | None, method: str) -> None:
        """Check the token of a call to ``method``; it is used up by that.

        Raises:
            Untrusted: There is none, it is not for this call, it is too old, or it was used before.
        """
        if token is None:
            raise Untrusted(_FIELD, "the call carries no token: its caller has no secret")
        match = _FORM.fullmatch(token)
        if match is None:
            raise Untrusted(_FIELD, "the call's token is none of ours")
        stamp, nonce, signature = match.groups()
        if not self._secret.is_signed(
            bytes.fromhex(signature), "call", self._caller.value, self._audience, method, stamp, nonce
        ):
            raise Untrusted(
                _FIELD,
                f"no {self._caller} with the same secret made the call's token for {self._audience}",
            )
        ago_s = self._unix_s() - int(stamp)
        if abs(ago_s) > WINDOW_S:
            raise Untrusted(
                _FIELD,
                f"the call's token is of {ago_s:.0f} s ago, {WINDOW_S} are allowed: "
                "the clocks of the two sides differ",
            )
        now_s = self._now_s()
        self._forget(now_s - 2 * WINDOW_S)
        if nonce in self._seen:
            raise Untrusted(_FIELD, "the call's token was used before")
        self._seen[nonce] = now_s

    def _forget(self, before_s: float) -> None:
        """Drop the nonces of tokens that are too old anyway."""
        while self._seen and (oldest := next(iter(self._seen.items())))[1] < before_s:
            del self._seen[oldest[0]]
