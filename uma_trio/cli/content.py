"""Contents of messages that a user has put together: a text, and files of pictures and sound."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

import click

from uma_trio.files import read_bytes
from uma_trio.protocol.chat import MAX_MEDIA_BYTES

Content = str | list[dict[str, Any]]
Kind = Literal["image", "audio"]

KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".gif", ".bmp"), "image"),
    **dict.fromkeys((".wav", ".mp3", ".flac"), "audio"),
}
"""Kind of a file, by its suffix."""


def content_with(images: Sequence[Path], sounds: Sequence[Path], text: str) -> Content:
    """A message's content: the pictures, the sounds, then the text.

    Raises:
        UsageError: a file cannot be read, or is too large.
    """
    if not images and not sounds:
        return text
    image_parts = [media_part(path, "image") for path in images]
    sound_parts = [media_part(path, "audio") for path in sounds]
    return [*image_parts, *sound_parts, {"type": "text", "text": text}]


def media_part(path: Path, kind: Kind) -> dict[str, Any]:
    """A picture or sound as a part of a content.

    Raises:
        UsageError: it cannot be read, or is too large.
    """
    try:
        return {"type": kind, "data": read_bytes(path.expanduser(), MAX_MEDIA_BYTES)}
    except OSError as error:
        raise click.UsageError(
            f"cannot read the {'picture' if kind == 'image' else 'sound'} {path}: {error.strerror or error}"
        ) from None


def dropped_file(line: str) -> tuple[Kind, str] | None:
    """The picture or sound whose path is the whole line.  Terminals paste the path of a file that is dropped on them."""
    try:
        [name] = shlex.split(line)
        if name.startswith("file://"):
            name = unquote(name.removeprefix("file://"))
        kind = KINDS.get(Path(name).suffix.lower())
        return (kind, name) if kind is not None and Path(name).expanduser().is_file() else None
    except (ValueError, OSError, RuntimeError):  # quotes without an end, several words, no such home directory
        return None
