"""What a measurement moves: the KV of one sequence, between two workers that store it so and so."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil

from kv_transfer.config import TransferConfig
from kv_transfer.plan import agreed_wire, plan_head_copies
from twinpool.core.errors import ConfigError
from twinpool.core.layout import KVLayout, wire_bytes
from twinpool.engine.load import parse_device

LAYOUTS = {
    "8b-bf16": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16"),
    "smollm2-fp32": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16, dtype="float32"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One transfer, to be repeated; both peers are told of it in the same words.

    Raises:
        ConfigError: It cannot be; the field is the option of `kv-bench` at fault.
    """

    layout: KVLayout  # of the sender
    target_tp: int = 1  # ranks of the receiver
    num_tokens: int
    compact: bool = False
    message_bytes: int = 2 * 2**20
    scattered: bool = True  # no two blocks of the sequence are neighbours in the cache, as in one long in use
    seed: int = 0
    device: str = "cpu"
    timeout_s: float = 60.0  # of one transfer

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ConfigError("--tokens", f"{self.num_tokens} is less than 1")
        if not self.timeout_s > 0:
            raise ConfigError("--timeout", f"{self.timeout_s:g} s is not above 0")
        parse_device(self.device)
        if self.layout.block_tokens < 1:
            raise ConfigError("--block-tokens", f"{self.layout.block_tokens} is less than 1")
        try:
            self.transfer_config(checksum=True, host="")
        except ConfigError as error:
            raise ConfigError("--message-bytes", error.problem) from None
        try:
            self.target_layout  # noqa: B018 - checked when it is made
        except ConfigError as error:
            raise ConfigError("--tp", error.problem) from None

    @property
    def target_layout(self) -> KVLayout:
        """The layout of the receiver."""
        return replace(self.layout, tp_size=self.target_tp)

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence on each rank."""
        return self.layout.num_blocks(self.num_tokens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV, each head once."""
        return self.num_tokens * self.layout.token_bytes

    @property
    def wire(self) -> str:
        """The format in which it travels."""
        return agreed_wire(self.layout, self.target_layout, compact=self.compact)

    @property
    def wire_bytes(self) -> int:
        """Bytes of all payloads: each head as often as target ranks keep it, in the wire format."""
        copies = plan_head_copies(self.layout, self.target_layout)
        return self.layout.num_layers * wire_bytes(
            self.wire,
            num_tokens=self.num_tokens,
            num_heads=sum(copy.num_heads for copy in copies),
            head_dim=self.layout.head_dim,
        )

    def transfer_config(self, *, checksum: bool, host: str) -> TransferConfig:
        """Return the settings of transfers; ``host`` is where transports listen, empty for loopback."""
        return TransferConfig(
            message_bytes=self.message_bytes,
            credit_bytes=max(TransferConfig().credit_bytes, self.message_bytes),
            checksum=checksum,
            compact=self.compact,
            lease_s=max(1.0, self.timeout_s),  # the deadline of a transfer is shorter then
            listen=f"{host}:0" if host else "",
        )

    def check_memory(self) -> None:
        """Check that this process can hold the KV and a copy of it for the bare link.

        Raises:
            ConfigError: It cannot.
        """
        needed, free = 2 * self.wire_bytes + self.kv_bytes, psutil.virtual_memory().available
        if needed > free:
            raise ConfigError("--bytes", f"needs {needed} bytes of memory, {free} are free")
