"""What a model keeps per sequence, over all its layers: bytes per token, per conversation, per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from twinpool.core.errors import ConfigError
from twinpool.core.layout import DTYPE_BYTES
from twinpool.lab.memory.cache_format import CacheFormat
from twinpool.lab.memory.layer import Layer, LayerKV


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How one rank of a worker keeps KV."""

    form: CacheFormat
    dtype: str  # of the model: of what of a state is not float32; a key of DTYPE_BYTES
    block_tokens: int = 16
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError("dtype", f"{self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if self.block_tokens < 1:
            raise ConfigError("engine.block_tokens", f"{self.block_tokens} is less than 1")
        if self.num_ranks < 1:
            raise ConfigError("tensor_parallel", f"{self.num_ranks} is less than 1")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The layers of a model, as their caches see them.  All bytes are those of one rank."""

    layers: tuple[Layer, ...]

    @property
    def kv_layers(self) -> Sequence[LayerKV]:
        """Layers that keep KV."""
        return [layer.kv for layer in self.layers if layer.kv is not None]

    @property
    def has_states(self) -> bool:
        return any(layer.state is not None for layer in self.layers)

    @property
    def has_windows(self) -> bool:
        return any(kv.window is not None for kv in self.kv_layers)

    def unwindowed(self) -> CacheShape:
        """Return the shape in an engine that keeps all tokens of every layer, as ours does."""
        return CacheShape(
            tuple(
                layer if layer.kv is None else replace(layer, kv=replace(layer.kv, window=None))
                for layer in self.layers
            )
        )

    def token_bytes(self, settings: CacheSettings) -> int:
        """Return what one more token takes while no window is full: 2 x layers x heads x head dim x element.

        Source:
            Kwon et al., PagedAttention (arXiv 2309.06180), section 3: 800 KB per token of OPT-13B.
        """
        return sum(kv.token_bytes(settings.form, num_ranks=settings.num_ranks) for kv in self.kv_layers)

    def unbounded_token_bytes(self, settings: CacheSettings) -> int:
        """Return what one more token takes once every window is full."""
        endless = [kv for kv in self.kv_layers if kv.window is None]
        return sum(kv.token_bytes(settings.form, num_ranks=settings.num_ranks) for kv in endless)

    def block_bytes(self, settings: CacheSettings) -> int:
        """Return what one block takes in all layers."""
        return settings.block_tokens * self.token_bytes(settings)

    def state_bytes(self, settings: CacheSettings) -> int:
        """Return what a sequence takes before its first token."""
        dtype_bytes = DTYPE_BYTES[settings.dtype]
        states = [layer.state for layer in self.layers if layer.state is not None]
        return sum(
            state.sequence_bytes(dtype_bytes=dtype_bytes, num_ranks=settings.num_ranks) for state in states
        )

    def scale_bytes(self, settings: CacheSettings) -> int:
        """Return what is kept once, whoever is served: the scales of layers."""
        return len(self.kv_layers) * settings.form.layer_scale_bytes

    def conversation_bytes(self, num_tokens: int, settings: CacheSettings) -> int:
        """Return what a sequence of ``num_tokens`` tokens takes: whole blocks, windows and states."""
        kept = (
            kv.held_tokens(num_tokens, block_tokens=settings.block_tokens)
            * kv.token_bytes(settings.form, num_ranks=settings.num_ranks)
            for kv in self.kv_layers
        )
        return sum(kept) + self.state_bytes(settings)
