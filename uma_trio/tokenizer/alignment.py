"""Trace tokens back to the bytes of the text that they come from.  Pure: needs only the tokens' spellings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

ESCAPED_SPACE: Final = "\u2581".encode()
"""SentencePiece's form of a space.  In a text it is tokenized as a space."""

WHITESPACE: Final = b" \t\n\v\f\r"
"""What a stripping token removes: C's ``isspace``."""


@attrs.frozen
class Spelling:
    """How a token appears in a text."""

    text: bytes
    special: bool = False
    """Found in the text before the rest was tokenized: control tokens and user-defined tokens."""
    strips_left: bool = False
    strips_right: bool = False
    """A special token removes the whitespace on this side."""


def align(text: bytes, tokens: Iterable[Spelling], *, space_prefix: bool) -> list[tuple[int, int]] | None:
    """Find the byte range [start, end) of each token in ``text``.

    Checks everything on the way: each spelling must be found where the previous one ended, and the last one must end
    with the text.

    Args:
        text: UTF-8.
        tokens: the tokens of ``text``, without BOS, EOS and the like.
        space_prefix: the vocabulary puts a space before each stretch of text between special tokens.  That space has
            no bytes in ``text``: a token that consists of it alone has an empty range.

    Returns:
        Ascending ranges that do not overlap and cover the text, except for stripped whitespace.  ``None`` if the
        tokens do not spell the text, for example because the vocabulary normalises it first.
    """
    ranges = []
    at = 0
    prefixed = space_prefix
    for token in tokens:
        start = _skip_whitespace(text, at) if token.special and token.strips_left else at
        if token.special and text.startswith(token.text, start):
            end = start + len(token.text)
            at = _skip_whitespace(text, end) if token.strips_right else end
            prefixed = space_prefix
        else:
            spelling = token.text
            if prefixed:
                if not spelling.startswith(b" "):
                    return None
                spelling, prefixed = spelling[1:], False
            start = at
            spelling_end = _match_end(text, start, spelling)
            if spelling_end is None:
                return None
            at = end = spelling_end
        ranges.append((start, end))
    return ranges if at == len(text) else None


def _match_end(text: bytes, at: int, spelling: bytes) -> int | None:
    """The end of ``spelling`` at ``at``; ``None`` if the text differs."""
    if text.startswith(spelling, at):
        return at + len(spelling)
    for byte in spelling:
        if text[at : at + 1] == bytes((byte,)):
            at += 1
        elif byte == ord(" ") and text.startswith(ESCAPED_SPACE, at):
            at += len(ESCAPED_SPACE)
        else:
            return None
    return at


def _skip_whitespace(text: bytes, at: int) -> int:
    while at < len(text) and text[at] in WHITESPACE:
        at += 1
    return at
