"""Sizes for people."""

from __future__ import annotations


def format_bytes(n: int) -> str:
    """Format ``n`` bytes, in the unit that fits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:,.1f} {unit}"
    return f"{n} B"
