"""Settings of KV transfers; the same for every worker of a deployment."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from twinpool.core.errors import ConfigError

# No transport sends or takes a larger message, so a peer cannot make us allocate more than this.
MAX_MESSAGE_BYTES = 8 * 2**20
MAX_CREDIT_BYTES = 2**40  # more than any machine has, and less than what a message can say
_HEADER_ROOM_BYTES = 2**20
_LEAST_S = 0.1  # anything shorter is over before a busy machine has done anything at all
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}", re.ASCII)
_PROTOCOL = "2"  # changes whenever two ends of different builds would misunderstand each other


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How KV moves between two workers."""

    lease_s: float = 30.0  # a transfer without progress for so long gives its room back
    message_bytes: int = 2 * 2**20  # payload that one message aims at
    credit_bytes: int = 16 * 2**20  # most payload a sender may have in flight to one transfer
    checksum: bool = True  # off only to measure its cost, or to show that its absence is noticed
    connect_timeout_s: float = 5.0  # until a peer has answered the first message
    transports: tuple[
        str, ...
    ] = ()  # file names in kv_transfer/transports, best first; empty: all that work here
    whole_below_tokens: int = 64  # a prompt with fewer tokens to send goes in one piece once it is computed
    compact: bool = False  # KV travels as int8 with a scale per token and head: smaller, and not exact
    convert_dtypes: bool = False  # workers may store KV in different dtypes
    listen: str = ""  # own address, as the transport spells it; empty: any free one on this host
    advertise_host: str = ""  # what peers connect to when `listen` is a wildcard

    def __post_init__(self) -> None:
        for name, least in (
            ("lease_s", _LEAST_S),
            ("connect_timeout_s", _LEAST_S),
            ("message_bytes", 1),
            ("whole_below_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"transfer.{name}", f"{getattr(self, name)} is less than {least}")
        if self.message_bytes > MAX_MESSAGE_BYTES - _HEADER_ROOM_BYTES:
            raise ConfigError(
                "transfer.message_bytes",
                f"{self.message_bytes} is more than {MAX_MESSAGE_BYTES - _HEADER_ROOM_BYTES}",
            )
        if self.credit_bytes > MAX_CREDIT_BYTES:
            raise ConfigError("transfer.credit_bytes", f"{self.credit_bytes} is more than {MAX_CREDIT_BYTES}")
        if self.credit_bytes < self.message_bytes:
            raise ConfigError(
                "transfer.credit_bytes",
                f"{self.credit_bytes} is less than one message of {self.message_bytes}",
            )
        for name in self.transports:
            if self.transports.count(name) > 1:
                raise ConfigError("transfer.transports", f"{name} stands there twice")
        if self.advertise_host and not _is_host(self.advertise_host):
            raise ConfigError(
                "transfer.advertise_host", f"{self.advertise_host[:100]!r} is no name or address"
            )

    @property
    def fingerprint(self) -> dict[str, str]:
        """What two workers must say alike before they are paired, by name."""
        return {
            "kv_protocol": _PROTOCOL,
            "kv_compact": str(self.compact).lower(),
            "kv_checksum": str(self.checksum).lower(),
            "convert_dtypes": str(self.convert_dtypes).lower(),
        }


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return _HOST_NAME.fullmatch(text) is not None
    return True
