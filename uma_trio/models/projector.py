"""The projector of a model: a second file, which turns pictures into rows that the model takes in place of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from uma_trio.models.gguf_check import SECTIONED_ROPE
from uma_trio.models.gguf_header import GgufError, GgufHeader, read_header

PATTERN: Final = "mmproj*.gguf"
"""Names of projectors, as llama.cpp's converter makes them."""
ARCHITECTURE: Final = "clip"
NON_CAUSAL: Final = frozenset({"gemma3", "gemma4v", "gemma4uv", "deepseek4v"})
"""Types of projectors whose rows attend to all rows of their picture (mtmd.cpp, ``mtmd_decode_use_non_causal``)."""
CAUSAL_WIDTHS: Final = frozenset({1536, 2560})
"""Widths of the models of Gemma 4 that attend causally all the same."""


def check_projector(path: Path, model: Path) -> int:
    """Check that a file is a projector, and one of ``model``; returns its size in bytes.

    Raises:
        GgufError: it is another kind of file, damaged, or of a model of another width.
        OSError: one of the files cannot be read.
    """
    header = read_header(path)
    if header.text("general.architecture") != ARCHITECTURE:
        raise GgufError(f"{path} is no projector, but a model", "give the mmproj file that was made with the model")
    if not _fits(header, read_header(model)):
        raise GgufError(
            f"the projector {path} is of another model: the rows that it makes have another width",
            "give the mmproj file that was made with the model",
        )
    return header.size_bytes


def why_unusable(path: Path, model: Path) -> str | None:
    """Why ``model`` cannot see with the projector ``path``, as a sentence; ``None`` if it can.  Blocks.

    Raises:
        GgufError, OSError: as in ``check_projector``.
    """
    of_model, of_projector = read_header(model), read_header(path)
    architecture = of_model.text("general.architecture")
    sections = of_model.numbers(f"{architecture}.rope.dimension_sections")[:2]
    if architecture in SECTIONED_ROPE or (sections and min(sections) > 0):
        return "the model has positions in two dimensions (M-RoPE), which cannot be used with pictures yet"
    if not of_projector.values.get("clip.has_vision_encoder", False):
        return "the projector has no encoder of pictures"
    kind = of_projector.text("clip.projector_type") or of_projector.text("clip.vision.projector_type")
    is_causal = kind not in NON_CAUSAL or (kind == "gemma4v" and _width(of_model) in CAUSAL_WIDTHS)
    return None if is_causal else "the model needs non-causal attention for pictures, which cannot be used yet"


def find_projector(model: Path) -> Path | None:
    """The projector in the folder of ``model``; ``None`` unless exactly one file there can be it.  Blocks."""
    found = [path for path in model.parent.glob(PATTERN) if _is_of(path, model)]
    return found[0] if len(found) == 1 else None


def _is_of(path: Path, model: Path) -> bool:
    try:
        return check_projector(path, model) > 0
    except (GgufError, OSError):
        return False


def _fits(projector: GgufHeader, model: GgufHeader) -> bool:
    width = _width(model)
    return projector.values.get("clip.vision.projection_dim", width) == width


def _width(model: GgufHeader) -> object:
    return model.values.get(f"{model.text('general.architecture')}.embedding_length")
