"""Sizes as people read them; ``core.units`` reads them back."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(num_bytes: int) -> str:
    """Return a size with three digits or four, as in ``1.50 GiB``."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = 0 if unit == 0 else max(0, 3 - len(f"{abs(size):.0f}"))
    return f"{size:.{digits}f} {_UNITS[unit]}"
