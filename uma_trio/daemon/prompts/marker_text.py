"""Markers as templates spell them, in the form in which output is searched for them.  Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from uma_trio.models.markers import CONTROL_CHARS

_TOKEN: Final = re.compile(r"<\|?[^<>|]+\|?>|\[[A-Z_]+\]|｜[A-Z]+｜")
"""What may be a control token inside a marker."""
_PART: Final = re.compile(r"｜[A-Z]+｜")
"""What may be one inside what looks like another."""


class MarkerText:
    """Replaces the control tokens of a vocabulary in markers by characters that stand for them.

    Args:
        control_id: text to the id of the control token that it spells; ``None`` if it does not spell one.
    """

    def __init__(self, control_id: Callable[[str], int | None]) -> None:
        self._control_id = control_id
        self._found: dict[str, str | None] = {}
        self._controls: dict[int, str] = {}

    @property
    def controls(self) -> dict[int, str]:
        """Ids of the control tokens so far, each with the character that stands for it."""
        return dict(self._controls)

    def searched(self, marker: str) -> str:
        """``marker``, which is a control token or has some in it."""
        whole = self._character(marker)
        if whole is not None:
            return whole
        return _PART.sub(self._replaced, _TOKEN.sub(self._replaced, marker))

    def _replaced(self, match: re.Match[str]) -> str:
        return self._character(match[0]) or match[0]

    def _character(self, text: str) -> str | None:
        if text not in self._found:
            token = self._control_id(text)
            if token is not None:
                self._controls[token] = chr(CONTROL_CHARS[len(self._controls)])
            self._found[text] = None if token is None else self._controls[token]
        return self._found[text]
