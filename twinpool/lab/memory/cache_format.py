"""How a KV cache writes numbers down: bits per element, and the scales of quantised ones."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.errors import ConfigError
from twinpool.core.layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """The format of keys, values and latents.

    A *row* is what one head keeps of one token at one side: a key, a value, or a latent.
    """

    name: str
    element_bits: int
    row_scale_bytes: int = 0  # with each row: its scale, and its zero point where there is one
    layer_scale_bytes: int = 0  # once per layer

    def row_bytes(self, num_elements: int) -> int:
        """Return what a row of so many elements takes, scale included; whole bytes."""
        return -(-num_elements * self.element_bits // 8) + self.row_scale_bytes


FORMATS = {
    **{name: CacheFormat(name=name, element_bits=8 * size) for name, size in DTYPE_BYTES.items()},
    # One float32 scale for the keys and one for the values of a layer.
    "fp8": CacheFormat(name="fp8", element_bits=8, layer_scale_bytes=8),
    # A row has a float16 scale and a float16 zero point, or one float32 scale, as our wire format int8.
    "int8": CacheFormat(name="int8", element_bits=8, row_scale_bytes=4),
    "int4": CacheFormat(name="int4", element_bits=4, row_scale_bytes=4),
}


def cache_format(name: str, *, field: str) -> CacheFormat:
    """Return the format of that name.

    Raises:
        ConfigError: There is none; ``field`` is blamed.
    """
    if name not in FORMATS:
        raise ConfigError(field, f"{name!r} is none of {', '.join(FORMATS)}")
    return FORMATS[name]
