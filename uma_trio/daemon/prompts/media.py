"""Pictures and sound in a prompt: which of its tokens are rows of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from uma_trio.encoder.encoder import EncodedMedia, RowFile
from uma_trio.engine_link.media import PLACEHOLDER, MediaRows


@attrs.frozen(eq=False)
class PlacedRows:
    """Tokens of a prompt, one after another, that are rows of a file."""

    start: int
    """The first of them in the prompt."""
    n: int
    file: RowFile
    first: int
    """Row of the file for the first of them."""


def place(media: EncodedMedia, start: int) -> Iterator[PlacedRows]:
    """The rows of ``media``, whose tokens begin at ``start`` in the prompt."""
    is_row = np.concatenate([[False], media.tokens >= PLACEHOLDER, [False]])
    edges = np.flatnonzero(is_row[1:] != is_row[:-1]).tolist()
    first = 0
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        yield PlacedRows(start + begin, end - begin, media.rows, first)
        first += end - begin


def rows_between(placed: Sequence[PlacedRows], start: int, end: int) -> list[MediaRows]:
    """What the engine reads for the tokens of a prompt from ``start`` up to ``end``."""
    found = []
    for each in placed:
        begin, stop = max(start, each.start), min(end, each.start + each.n)
        if begin < stop:
            found.append(MediaRows(begin - start, stop - begin, each.file.fd, each.first + begin - each.start))
    return found
