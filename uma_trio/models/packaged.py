"""The models that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "embedded"

EMBEDDED: Final = _FOLDER / "embedded.gguf"
"""The demo and test model; see docs/EMBEDDED_MODEL.md."""

EMBEDDED_DRAFT: Final = _FOLDER / "draft.gguf"
"""Its draft model."""

PACKAGED: Final = {"embedded": EMBEDDED, "embedded-draft": EMBEDDED_DRAFT}
"""Their files, by name."""

PACKAGED_QUANTIZATION: Final = "Q8_0"
"""The quantization of all of them, which the names of their files do not have."""


def starts_with_first_picture(projector: Path | None) -> bool:
    """Whether the process of a projector starts with the first picture, so that fit keeps no room for it.

    So does the embedded one: few who serve the demo model ask about pictures.
    """
    return projector == _FOLDER / "mmproj.gguf"


def model_path(model: str | None) -> Path:
    """The file of the setting ``model``, once names are resolved (``uma_trio.hub.locate``)."""
    return EMBEDDED if model is None else Path(model).expanduser()
