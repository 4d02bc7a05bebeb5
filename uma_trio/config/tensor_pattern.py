"""Regular expressions for names of tensors: what C++'s and Python's engines read alike, and cannot take forever over.

llama.cpp searches the name of each tensor with ``std::regex``, which backtracks.  A pattern that is refused here would end
loading with an error without a remedy, mean something other than in Python, or keep it busy for hours.
"""

from __future__ import annotations

import re
from typing import Final

MAX_LENGTH: Final = 256
MAX_COUNT: Final = 64
"""Largest count of a repetition.  The name of a tensor has at most 64 characters."""
MAX_WAYS: Final = MAX_COUNT**4
"""About how many ways there may be to match a pattern: four times ``.*``, or alternatives for as much."""

_COUNTS: Final = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_ESCAPED: Final = frozenset("dDsSwWbB")
"""Letters and digits that may follow a backslash."""


def problem_of(pattern: str) -> str | None:
    """Why ``pattern`` cannot be used; ``None`` if it can."""
    if not pattern:
        return "it is empty"
    if len(pattern) > MAX_LENGTH:
        return f"it has {len(pattern)} characters, and {MAX_LENGTH} are the most"
    if not pattern.isascii() or not pattern.isprintable():
        return "names of tensors have printable ASCII characters only"
    try:
        _Scan(pattern).run()
        re.compile(pattern)
    except _Refused as refused:
        return str(refused)
    except re.error as error:
        return error.msg
    return None


class _Refused(Exception):
    """The reason."""


class _Scan:
    """Reads a pattern once, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._ways = 1
        self._open: list[bool] = [False]
        """For the pattern and each open group: whether there is a repetition or an alternative in it."""
        self._alternatives: list[int] = [1]

    def run(self) -> None:
        while self._at < len(self._pattern):
            self._repetition(self._atom())
        if len(self._open) > 1:
            raise _Refused("a group is not closed")
        self._multiply(self._alternatives[0])

    def _atom(self) -> bool | None:
        """Pass a character, a class or a bracket of a group.

        Returns:
            Whether it may be repeated; ``None`` for what cannot be, such as an anchor.
        """
        char = self._pattern[self._at]
        self._at += 1
        match char:
            case "\\":
                return self._escape()
            case "[":
                self._class()
            case "(":
                if self._pattern.startswith("?", self._at):
                    if not self._pattern.startswith("?:", self._at):
                        raise _Refused("(? is understood in (?: only")
                    self._at += 2
                self._open.append(False)
                self._alternatives.append(1)
                return None
            case ")":
                if len(self._open) == 1:
                    raise _Refused("a group is closed that is not open")
                self._multiply(self._alternatives.pop())
                varies = self._open.pop()
                self._open[-1] |= varies
                return not varies
            case "|":
                self._open[-1] = True
                self._alternatives[-1] += 1
                return None
            case "^" | "$":
                return None
            case "*" | "+" | "?" | "{":
                raise _Refused(f"there is nothing that {char} could repeat")
            case "]" | "}":
                raise _Refused(f"{char} needs a backslash")
        return True

    def _escape(self) -> bool | None:
        char = self._pattern[self._at : self._at + 1]
        self._at += 1
        if not char:
            raise _Refused("it ends with a backslash")
        if char.isalnum() and char not in _ESCAPED:
            raise _Refused(f"\\{char} is not supported")
        return None if char in "bB" else True

    def _class(self) -> None:
        begin = self._at
        self._at += self._pattern.startswith("^", self._at)
        while not self._pattern.startswith("]", self._at):
            char = self._pattern[self._at : self._at + 1]
            if not char:
                raise _Refused("a class is not closed")
            if char == "[" or self._pattern[self._at : self._at + 2] in ("--", "&&", "||", "~~"):
                raise _Refused(f"{char} needs a backslash in a class")
            self._at += 1
            if char == "\\":
                self._escape()
        if self._pattern[begin : self._at] in ("", "^"):
            raise _Refused("a class is empty")
        self._at += 1

    def _repetition(self, may_repeat: bool | None) -> None:
        char = self._pattern[self._at : self._at + 1]
        if char not in ("*", "+", "?", "{") or may_repeat is None:
            return
        least, most = {"*": (0, MAX_COUNT), "+": (1, MAX_COUNT), "?": (0, 1)}.get(char, (0, 0))
        self._at += 1
        if char == "{":
            counts = _COUNTS.match(self._pattern, self._at - 1)
            if counts is None:
                raise _Refused("{ needs numbers, as in {2} or {1,3}")
            self._at = counts.end()
            least = int(counts[1])
            most = least if counts[2] is None else int(counts[3] or MAX_COUNT)
            if max(least, most) > MAX_COUNT or most < least:
                raise _Refused(f"a count must be a number up to {MAX_COUNT}, the smaller one first")
        if most > 1 and not may_repeat:
            raise _Refused("a group with a repetition or an alternative in it is repeated, which may take forever")
        self._multiply(most - least + 1)
        self._open[-1] = True
        if self._pattern.startswith("?", self._at):  # as few as possible
            self._at += 1
        if self._pattern[self._at : self._at + 1] in ("*", "+", "?", "{"):
            raise _Refused("a repetition is repeated")

    def _multiply(self, n: int) -> None:
        self._ways *= n
        if self._ways > MAX_WAYS:
            raise _Refused("it has too many repetitions and alternatives, which may take forever")
