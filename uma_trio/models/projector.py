"""The projector of a model: a second file, which turns pictures into rows that the model takes in place of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from uma_trio.models.gguf_header import GgufError, GgufHeader, read_header

PATTERN: Final = "mmproj*.gguf"
"""Names of projectors, as llama.cpp's converter makes them."""
ARCHITECTURE: Final = "clip"
ENCODING_BYTES: Final = 256 << 20
"""What encoding takes besides the projector's weights."""


def check_projector(path: Path, model: Path) -> int:
    """Check that a file is a projector, and one of ``model``; returns its size in bytes.

    Raises:
        GgufError: it is another kind of file, damaged, or of a model of another width.
        OSError: one of the files cannot be read.
    """
    header = read_header(path)
    if header.text("general.architecture") != ARCHITECTURE:
        raise GgufError(f"{path}: it is no projector, but a model", "give the mmproj file that was made with the model")
    if not _fits(header, read_header(model)):
        raise GgufError(
            f"{path}: the projector is of another model, the rows that it makes have another width",
            "give the mmproj file that was made with the model",
        )
    return header.size_bytes


def encoding_bytes(path: Path) -> int:
    """Memory that encoding with a projector takes: its weights, a large picture, and compute buffers.

    Raises:
        OSError: the file cannot be read.
    """
    return path.stat().st_size + ENCODING_BYTES


def encodes(path: Path) -> tuple[bool, bool]:
    """Whether a projector has an encoder for pictures, and one for sound, as its file says.

    Raises:
        GgufError: the file is damaged.
        OSError: it cannot be read.
    """
    values = read_header(path).values
    return values.get("clip.has_vision_encoder") is True, values.get("clip.has_audio_encoder") is True


def find_projector(model: Path, others: Iterable[Path] = ()) -> Path | None:
    """The projector in the folder of ``model``, or of ``others``; ``None`` unless exactly one file can be it.  Blocks."""
    projectors = [path for path in (*model.parent.glob(PATTERN), *others) if _is_of(path, model)]
    return projectors[0] if len(projectors) == 1 else None


def _is_of(path: Path, model: Path) -> bool:
    try:
        return check_projector(path, model) > 0
    except (GgufError, OSError):
        return False


def _fits(projector: GgufHeader, model: GgufHeader) -> bool:
    width = _width(model)
    return all(projector.values.get(f"clip.{of}.projection_dim", width) == width for of in ("vision", "audio"))


def _width(model: GgufHeader) -> object:
    return model.values.get(f"{model.text('general.architecture')}.embedding_length")
