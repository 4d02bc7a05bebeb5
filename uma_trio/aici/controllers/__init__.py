"""Controllers that come with uma-trio: ``yesno``, ``uppercase`` and ``jsctrl``, with their sources and their SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Final

NAMES: Final = ("jsctrl", "uppercase", "yesno")


def shipped() -> dict[str, bytes]:
    """The built controllers: name -> Wasm."""
    folder = Path(__file__).parent
    return {name: (folder / f"{name}.wasm").read_bytes() for name in NAMES}
