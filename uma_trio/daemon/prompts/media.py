"""Pictures and sound in a prompt: where a chat has them, and which tokens of the prompt are rows of a file.

A chat template sees texts.  So each picture is one character for it, which no client can write; the rendered text is cut
there.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import Final

import attrs
import numpy as np

from uma_trio.daemon.prompts.control_tokens import PICTURE_CHARS
from uma_trio.encoder.encoded import EncodedMedia, RowBlock, RowFile
from uma_trio.engine_link.media import PLACEHOLDER, MediaRows
from uma_trio.engine_link.messages import PromptPart
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.protocol.chat import ChatMessage, ContentPart

SHOWN: Final = "<image>"
"""What people see in place of a picture, where a prompt is shown as text."""
_PICTURE: Final = re.compile(f"[{chr(PICTURE_CHARS[0])}-{chr(PICTURE_CHARS[-1])}]")


@attrs.frozen(eq=False)
class Picture:
    """A picture or sound of a chat."""

    data: bytes
    """Its file."""
    field: str
    """The field of the request that it comes from."""
    is_sound: bool = False


def take_pictures(
    history: Sequence[ChatMessage], messages: Sequence[ChatMessage]
) -> tuple[list[ChatMessage], list[Picture]]:
    """All messages with a character in place of each picture, and the pictures, at most ``MAX_PICTURES``, in order.

    Args:
        history: of the session.
    """
    pictures: list[Picture] = []

    def text_of(part: ContentPart, field: str) -> str:
        if part.data is None:
            return part.text or ""
        pictures.append(Picture(part.data, field, part.type == "audio"))
        return chr(PICTURE_CHARS[len(pictures) - 1])

    taken = []
    for n, message in enumerate([*history, *messages], -len(history)):
        if message.n_pictures and isinstance(message.content, list):
            path = f"messages[{n}].content" if n >= 0 else "the session"
            texts = [text_of(part, f"{path}[{i}]" if n >= 0 else path) for i, part in enumerate(message.content)]
            message = attrs.evolve(message, content="".join(texts))
        taken.append(message)
    return taken, pictures


def cut_at_pictures(parts: Sequence[PromptPart]) -> tuple[list[list[PromptPart]], list[int]]:
    """The text before, between and after the pictures, and the numbers of the pictures between these texts."""
    groups: list[list[PromptPart]] = [[]]
    numbers: list[int] = []
    for part in parts:
        at = 0
        for picture in _PICTURE.finditer(part.text):
            groups[-1] += [attrs.evolve(part, text=part.text[at : picture.start()])] if at < picture.start() else []
            groups.append([])
            numbers.append(ord(picture[0]) - PICTURE_CHARS[0])
            at = picture.end()
        groups[-1] += [attrs.evolve(part, text=part.text[at:])] if at < len(part.text) else []
    return groups, numbers


def picture_numbers(text: str) -> list[int]:
    """The numbers of the pictures in a rendered chat, in their order."""
    return [ord(char) - PICTURE_CHARS[0] for char in _PICTURE.findall(text)]


def with_pictures(texts: Sequence[str], numbers: Sequence[int]) -> str:
    """A rendered chat of its texts, and of pictures between these."""
    chars = [chr(PICTURE_CHARS[number]) for number in numbers[: len(texts) - 1]]
    return "".join(chain.from_iterable(zip_longest(texts, chars, fillvalue="")))


def has_all(parts: Sequence[PromptPart], n: int) -> bool:
    """Whether ``n`` pictures are in a rendered chat."""
    return not n or len({number for part in parts for number in picture_numbers(part.text)}) == n


def shown(text: str) -> str:
    """``text`` as people see it."""
    return _PICTURE.sub(SHOWN, text)


@attrs.frozen(eq=False)
class PlacedRows:
    """Tokens of a prompt, one after another, that are rows of a file."""

    start: int
    """The first of them in the prompt."""
    block: RowBlock
    file: RowFile
    first: int
    """Row of the file for the first of them."""

    @property
    def end(self) -> int:
        """The token of the prompt after the last of them."""
        return self.start + self.block.n


def rows_of(media: EncodedMedia, start: int) -> Iterator[PlacedRows]:
    """The rows of ``media``, whose tokens begin at ``start`` in the prompt."""
    positions = np.flatnonzero(media.tokens >= PLACEHOLDER).tolist()
    first = 0
    for block in media.blocks:
        yield PlacedRows(start + positions[first], block, media.rows, first)
        first += block.n


def split_at_media(tokens: TokenIds, media: Sequence[EncodedMedia]) -> tuple[list[TokenIds], list[int]] | None:
    """The tokens before, between and after the files in ``tokens``, and where each file begins.

    Args:
        media: files in their order, the first of which are in ``tokens``.

    Returns:
        ``None`` if other files are there.
    """
    texts: list[TokenIds] = []
    starts: list[int] = []
    at, positions = 0, np.flatnonzero(tokens >= PLACEHOLDER)
    for file in media:
        left = positions[np.searchsorted(positions, at) :]
        if not len(left):
            break
        start = int(left[0]) - int(np.argmax(file.tokens >= PLACEHOLDER))
        if start < at or not np.array_equal(tokens[start : start + len(file.tokens)], file.tokens):
            return None
        texts.append(tokens[at:start])
        starts.append(start)
        at = start + len(file.tokens)
    rest = tokens[at:]
    return None if (rest >= PLACEHOLDER).any() else ([*texts, rest], starts)


def rows_between(placed: Sequence[PlacedRows], start: int, end: int) -> list[MediaRows]:
    """What the engine reads for the tokens of a prompt from ``start`` up to ``end``."""
    between = []
    for rows in placed:
        begin, stop = max(start, rows.start), min(end, rows.end)
        if begin < stop:
            row = begin - rows.start
            where = (begin - start, stop - begin, rows.file.fd, rows.first + row)
            between.append(MediaRows(*where, is_causal=rows.block.is_causal, columns=rows.block.columns, row=row))
    return between


def whole_part(placed: Sequence[PlacedRows], start: int, end: int) -> tuple[int, bool]:
    """The last token that a step from ``start`` may compute, and whether the step must compute all tokens up to it.

    Rows that attend to each other are in a step of their own prompt, and none of them is left out.

    Args:
        end: the last token that could be computed.
    """
    for rows in placed:
        if not rows.block.is_causal and start < rows.end:
            return (rows.end, True) if rows.start <= start else (min(end, rows.start), False)
    return end, False
