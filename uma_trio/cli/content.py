"""Contents of messages that a user has put together: a text, and files of pictures and sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click

from uma_trio.files import read_bytes
from uma_trio.protocol.chat import MAX_PICTURE_BYTES

Content = str | list[dict[str, Any]]


def content_with(images: Sequence[Path], sounds: Sequence[Path], text: str) -> Content:
    """A message's content: the pictures, the sounds, then the text.

    Raises:
        UsageError: a file cannot be read, or is too large.
    """
    if not images and not sounds:
        return text
    heard = [picture_part(path, "audio") for path in sounds]
    return [*map(picture_part, images), *heard, {"type": "text", "text": text}]


def picture_part(path: Path, kind: Literal["image", "audio"] = "image") -> dict[str, Any]:
    """A file as a part of a content.

    Raises:
        UsageError: it cannot be read, or is too large.
    """
    try:
        return {"type": kind, "data": read_bytes(path.expanduser(), MAX_PICTURE_BYTES)}
    except OSError as error:
        raise click.UsageError(
            f"cannot read the {'picture' if kind == 'image' else 'sound'} {path}: {error.strerror or error}"
        ) from None
