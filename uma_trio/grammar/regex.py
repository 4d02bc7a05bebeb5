r"""Regular expressions of clients, as llguidance reads them.

``\d``, ``\w`` and ``\s`` match ASCII characters only, as with ``re.ASCII`` in Python: a model that may write any digit
of Unicode does so.  llguidance itself has this rule for JSON schemas only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

_INSTEAD: Final = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Z_a-z]",
    r"\W": "[^0-9A-Z_a-z]",
    r"\s": r"[\x09-\x0d\x20]",
    r"\S": r"[^\x09-\x0d\x20]",
    "/": r"\/",
    "\n": r"\n",
    "\\\n": r"\n",
}

_PIECE: Final = re.compile(r"--|(-)(?=\\[dDsSwW])|\\.|.", re.DOTALL)
"""``--`` subtracts sets.  The group is a hyphen in front of a class: it stands for itself, since no range ends there."""

_IN_LARK: Final = re.compile(r"""("(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*)|/((?:\\[^\n]|[^/\\\n])+)/""", re.DOTALL)
"""A text or a comment; or a regular expression, which is the second group."""

Pieces = Iterable[tuple[str, str]]
"""The parts of a text, each with what stands for it."""


def in_slashes(regex: str) -> str:
    """``regex`` as an expression of llguidance's Lark."""
    return f"/{_translated(_pieces(regex))}/"


def in_lark(grammar: str) -> str:
    """A grammar in Lark, with all its regular expressions translated."""
    return _translated(_pieces_of_lark(grammar))


def own_position(regex: str, position: int) -> int:
    """A position in what stands between the slashes, as a position in ``regex``."""
    return _own_position(_pieces(regex), position)


def own_column(line: str, column: int) -> int:
    """A column of a translated line of Lark, as a column of ``line``.  The first one is 1."""
    return _own_position(_pieces_of_lark(line), column - 1) + 1


def own_regex(grammar: str, translated: str) -> str:
    """The expression of a grammar in Lark that became ``translated``."""
    own = (match[2] for match in _IN_LARK.finditer(grammar) if match[2] is not None)
    return next((regex for regex in own if _translated(_pieces(regex)) == translated), translated)


def _pieces(regex: str) -> Iterator[tuple[str, str]]:
    for match in _PIECE.finditer(regex):
        yield match[0], r"\-" if match[1] else _INSTEAD.get(match[0], match[0])


def _pieces_of_lark(grammar: str) -> Iterator[tuple[str, str]]:
    end = 0
    for match in _IN_LARK.finditer(grammar):
        if match[2] is not None:
            yield grammar[end : match.start(2)], grammar[end : match.start(2)]
            yield from _pieces(match[2])
            end = match.end(2)
    yield grammar[end:], grammar[end:]


def _translated(pieces: Pieces) -> str:
    return "".join(instead for _, instead in pieces)


def _own_position(pieces: Pieces, position: int) -> int:
    before = own = 0
    for piece, instead in pieces:
        if position < before + len(instead):
            return own + min(position - before, len(piece) - 1)
        before += len(instead)
        own += len(piece)
    return own
