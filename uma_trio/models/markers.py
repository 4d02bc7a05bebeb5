"""How a model marks the regions of its output that are not text of the answer: reasoning, and calls of tools.

A string may be text, control tokens (``CONTROL_CHARS``), or a mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

CONTROL_CHARS: Final = range(0xD800, 0xE000)
"""Lone surrogates, which decoded text never contains.  In the strings of markers each stands for a control token, so
text that merely spells a control token is no marker."""

OTHER_CONTROL: Final = chr(CONTROL_CHARS[-1])
"""Stands for control tokens that are no markers."""


@attrs.frozen(kw_only=True)
class ReasoningMarkers:
    """How a model marks its reasoning."""

    begin: tuple[str, ...]
    """One of these begins reasoning: at the beginning of the output, after spaces at most."""
    end: tuple[str, ...]
    """One of these ends it."""
    dropped: tuple[str, ...] = ()
    """These are removed from the answer."""
    repeats: bool = False
    """Whether ``begin`` also counts later, so that an answer can have several stretches of reasoning."""
    controls: Mapping[int, str] = attrs.field(factory=dict)
    """Ids of control tokens, each with the character that stands for it."""
    opened_by: tuple[str, ...] = ()
    """A prompt that ends with one of these, spelled out, begins the reasoning itself."""
    closed_by: str = ""
    """What ends reasoning, spelled out, where it is ended from outside."""

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the output that follows ``prompt`` begins inside reasoning."""
        return prompt.rstrip().endswith(self.opened_by) if self.opened_by else False


@attrs.frozen(kw_only=True)
class ParameterTags:
    """How a model writes arguments one by one: ``<parameter=KEY>VALUE</parameter>``.

    A string is written as it is, anything else as JSON.  Line breaks around tags are as a model is made to write them;
    a model that writes other spaces there is understood.
    """

    begin_call: str = ""
    """Comes before the name of the tool, after the marker that begins the region; may be empty."""
    end_call: str
    before_key: str
    before_value: str
    before_json: str | None = None
    """Instead of ``before_value``, where the value is no string; ``None``: the schema of the tool decides."""
    padding: str = ""
    """On both sides of a value: a line break, or nothing."""
    after_value: str


@attrs.frozen(kw_only=True)
class CallMarkers:
    """How a model writes calls of tools.

    A call is a JSON object with ``name`` and ``arguments`` (or ``parameters``).  If ``named``, it is the name, anything
    short, and the arguments as an object.  With ``tags``, it is the name, and each argument between tags.  A region may
    have several calls; objects also as a JSON list.
    """

    begin: tuple[str, ...]
    """One of these begins a region of calls, anywhere in the answer."""
    end: tuple[str, ...] = ()
    """One of these ends it.  Otherwise it ends where no call follows."""
    bare: bool = False
    """Whether an answer that begins with ``{`` may be calls without a marker."""
    named: bool = False
    numbered: bool = False
    """Whether a ``named`` call is written ``functions.NAME:NUMBER``."""
    tags: ParameterTags | None = None
    quote: str | None = None
    """Around strings, for arguments in Gemma's notation; ``None``: arguments are JSON."""
    dropped: tuple[str, ...] = ()
    """These are removed from the answer."""
    written: tuple[str, str, str]
    """How the model is made to write a call: text before the name, between name and arguments, and after them."""
    around: tuple[str, str] = ("", "")
    """Text before all calls and after them, written in the same way."""
    separator: str | None = None
    """Text between calls, written in the same way; ``None``: an answer has one call."""
    controls: Mapping[int, str] = attrs.field(factory=dict)
    """As in ``ReasoningMarkers``; a character stands for the same token in both."""


def visible(text: str) -> str:
    """``text`` without the characters that stand for control tokens: like any control token they have no text."""
    return "".join(c for c in text if ord(c) not in CONTROL_CHARS)
