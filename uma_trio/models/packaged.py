"""The models that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "embedded"

PACKAGED: Final = {"embedded": _FOLDER / "embedded.gguf", "embedded-draft": _FOLDER / "draft.gguf"}
"""Their files, by name; see docs/EMBEDDED_MODEL.md."""

PACKAGED_QUANTIZATION: Final = "Q8_0"
"""The quantization of all of them, which the names of their files do not have."""
