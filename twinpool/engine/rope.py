"""Rotary positions: the frequencies of every scaling we know, and the rotation itself.

Shapes: T tokens, H heads, D head dim, F = D / 2 frequencies.

Source: transformers, modeling_rope_utils.py, which our numbers must equal; YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How one model turns positions into angles."""

    kind: str
    inverse_frequencies: tuple[float, ...]  # radians per position; half the head dim
    amplitude: float  # factor on cosines and sines
    max_tokens: int  # positions from here on are not served


class Rope:
    """The rotation of queries and keys.

    Args:
        config: The angles.
        device: Where positions live.
        dtype: Of queries and keys.
    """

    def __init__(self, config: RopeConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        frequencies_F = torch.tensor(config.inverse_frequencies, dtype=torch.float32, device=device)
        self._frequencies_D = torch.cat((frequencies_F, frequencies_F))
        signs_F = torch.ones_like(frequencies_F)
        self._signs_D = torch.cat((-signs_F, signs_F)) * config.amplitude
        self._amplitude = config.amplitude
        self._dtype = dtype

    def angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of ``positions_T``, [T, 1, D] each, for ``rotate``."""
        angles_T1D = (positions_T.float()[:, None] * self._frequencies_D).unsqueeze(1)
        cos = angles_T1D.cos() * self._amplitude
        sin = angles_T1D.sin() * self._signs_D
        return cos.to(self._dtype), sin.to(self._dtype)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other.

    The sines of the first half carry a minus, so that swapping the halves is all that is left of
    ``rotate_half``.
    """
    return torch.addcmul(x_THD * cos_T1D, x_THD.roll(x_THD.shape[-1] // 2, -1), sin_T1D)


def read_rope(config: ModelConfig, *, head_dim: int, max_tokens: int) -> RopeConfig:
    """Read the rotary settings in either spelling: ``rope_scaling`` or ``rope_parameters``.

    ``dynamic`` changes the angles of all positions once a sequence grows past ``max_tokens``, which keys
    already in the cache cannot follow; so longer sequences are not served, and up to that length the
    angles are the plain ones.  ``yarn`` serves the length it was stretched to.

    Raises:
        ModelError: The type is unknown, or a number is missing or unusable.
    """
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd, rotary positions need pairs")
    scaling = config.part("rope_scaling") or config.part("rope_parameters") or ModelConfig({})
    kind_field = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.choice(kind_field, tuple(sorted(_KINDS)), default="default")
    for holder in (config, scaling):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "is not 1.0, which is all that is served")
    base = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    original = config.integer(
        "original_max_position_embeddings",
        scaling.integer("original_max_position_embeddings", max_tokens),
    )
    return _KINDS[kind](
        scaling, _Plain(base=base, head_dim=head_dim, max_tokens=max_tokens, original=original)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    base: float
    head_dim: int
    max_tokens: int
    original: int  # context of the training before it was stretched

    def frequencies(self) -> Tensor:
        exponents_F = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        return 1.0 / (self.base**exponents_F)

    def finish(
        self, kind: str, frequencies_F: Tensor, *, amplitude: float = 1.0, max_tokens: int | None = None
    ) -> RopeConfig:
        return RopeConfig(
            kind=kind,
            inverse_frequencies=tuple(frequencies_F.tolist()),
            amplitude=amplitude,
            max_tokens=max_tokens or self.max_tokens,
        )


def _default(scaling: ModelConfig, plain: _Plain) -> RopeConfig:
    return plain.finish("default", plain.frequencies())


def _linear(scaling: ModelConfig, plain: _Plain) -> RopeConfig:
    return plain.finish("linear", plain.frequencies() / scaling.number("factor"))


def _dynamic(scaling: ModelConfig, plain: _Plain) -> RopeConfig:
    scaling.number("factor")
    return plain.finish("dynamic", plain.frequencies())


def _llama3(scaling: ModelConfig, plain: _Plain) -> RopeConfig:
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"{high} is not above low_freq_factor, {low}")
    frequencies_F = plain.frequencies()
    lengths_F = 2 * math.pi / frequencies_F
    stretched_F = torch.where(lengths_F > plain.original / low, frequencies_F / factor, frequencies_F)
    smooth_F = (plain.original / lengths_F - low) / (high - low)
    smoothed_F = (1 - smooth_F) * stretched_F / factor + smooth_F * stretched_F
    between_F = (lengths_F >= plain.original / high) & (lengths_F <= plain.original / low)
    return plain.finish("llama3", torch.where(between_F, smoothed_F, stretched_F))


def _yarn(scaling: ModelConfig, plain: _Plain) -> RopeConfig:
    factor = scaling.number("factor", plain.max_tokens / plain.original)
    half = plain.head_dim // 2

    def dimension(turns: float) -> float:
        return plain.head_dim * math.log(plain.original / (turns * 2 * math.pi)) / (2 * math.log(plain.base))

    low = dimension(scaling.number("beta_fast", 32.0))
    high = dimension(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, plain.head_dim - 1)
    if low == high:
        high += 0.001
    ramp_F = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    exponents_F = torch.arange(0, plain.head_dim, 2).float() / plain.head_dim
    powers_F = plain.base**exponents_F
    frequencies_F = (1.0 / (factor * powers_F)) * ramp_F + (1.0 / powers_F) * (1 - ramp_F)
    return plain.finish(
        "yarn",
        frequencies_F,
        amplitude=_yarn_amplitude(scaling, factor),
        max_tokens=max(plain.max_tokens, int(plain.original * factor)),
    )


def _yarn_amplitude(scaling: ModelConfig, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in scaling:
        return scaling.number("attention_factor")
    if scaling.fields.get("mscale") and scaling.fields.get("mscale_all_dim"):
        return scale(scaling.number("mscale")) / scale(scaling.number("mscale_all_dim"))
    return scale(1.0)


_KINDS: dict[str, Callable[[ModelConfig, _Plain], RopeConfig]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
