"""Which bytes of a text each of its tokens stands for: pure, from the tokens' spellings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

ESCAPED_SPACE: Final = "\u2581".encode()
"""What SentencePiece keeps for a space; in a text it is taken for one."""
WHITE: Final = b" \t\n\v\f\r"
"""What a token that strips takes away: C's ``isspace``."""


@attrs.frozen
class Spelling:
    """A token as it stands in a text."""

    text: bytes
    cut_out: bool = False
    """Found in the text before the rest was tokenized, piece by piece: control tokens and the like."""
    strips_left: bool = False
    strips_right: bool = False
    """Takes the white space on that side away, if it was cut out."""


def align(text: bytes, tokens: Iterable[Spelling], *, space_prefix: bool) -> list[tuple[int, int]] | None:
    """The range [start, end) of ``text`` for each of its tokens.

    Walks along the text and takes nothing on trust: each spelling has to stand where the walk is, and
    the last one has to end with the text.

    Args:
        text: UTF-8.
        tokens: those that come from ``text``, without what was put around it.
        space_prefix: each piece of text between tokens that were cut out was given a space in front.
            That space has no bytes in ``text``: a token that is nothing else has an empty range.

    Returns:
        Ranges that ascend and do not overlap.  They cover the text but for white space that was
        stripped.  ``None`` where the tokens do not spell the text, as when it was normalised first.
    """
    ranges = []
    at = 0
    prefixed = space_prefix
    for token in tokens:
        start = _after_white(text, at) if token.cut_out and token.strips_left else at
        if token.cut_out and text.startswith(token.text, start):
            end = start + len(token.text)
            at = _after_white(text, end) if token.strips_right else end
            prefixed = space_prefix
        else:
            spelling = token.text
            if prefixed:
                if not spelling.startswith(b" "):
                    return None
                spelling, prefixed = spelling[1:], False
            start = at
            found = _end(text, start, spelling)
            if found is None:
                return None
            at = end = found
        ranges.append((start, end))
    return ranges if at == len(text) else None


def _end(text: bytes, at: int, spelling: bytes) -> int | None:
    """Where ``spelling`` ends that begins at ``at``; ``None`` where something else stands there."""
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


def _after_white(text: bytes, at: int) -> int:
    while at < len(text) and text[at] in WHITE:
        at += 1
    return at
