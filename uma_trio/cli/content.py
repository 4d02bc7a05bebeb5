"""Contents of messages that a user has put together: a text, and files of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from uma_trio.files import read_bytes
from uma_trio.protocol.chat import MAX_PICTURE_BYTES

Content = str | list[dict[str, Any]]


def content_with(images: Sequence[Path], text: str) -> Content:
    """A message's content: the pictures, then the text.

    Raises:
        UsageError: a file cannot be read, or is too large.
    """
    if not images:
        return text
    return [*map(picture_part, images), {"type": "text", "text": text}]


def picture_part(path: Path) -> dict[str, Any]:
    """A file as a part of a content.

    Raises:
        UsageError: it cannot be read, or is too large.
    """
    try:
        return {"type": "image", "data": read_bytes(path.expanduser(), MAX_PICTURE_BYTES)}
    except OSError as error:
        raise click.UsageError(f"cannot read the picture {path}: {error.strerror or error}") from None
