"""Text of an answer whose reasoning is separate: which part of the output is reasoning, and which is the answer."""

from __future__ import annotations

import codecs
import enum
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import attrs

from uma_trio.sampling.text import StringSearch

CONTROL_CHARS: Final = range(0xD800, 0xE000)
"""Lone surrogates, which decoded text never contains.  In the strings of ``ReasoningMarkers`` each stands for a control
token, so text that merely spells a control token is no marker."""


@attrs.frozen(kw_only=True)
class ReasoningMarkers:
    """How a model marks its reasoning.  A string may be text, control tokens (``CONTROL_CHARS``), or a mix."""

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

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the output that follows ``prompt`` begins inside reasoning."""
        return prompt.rstrip().endswith(self.opened_by) if self.opened_by else False


class Split(NamedTuple):
    """New text of an answer.  The reasoning comes before the text."""

    reasoning: str
    text: str


class _State(enum.Enum):
    START = enum.auto()
    """Nothing but spaces, or the beginning of a marker."""
    REASONING = enum.auto()
    ANSWER = enum.auto()


class ReasoningAssembler:
    """Like ``TextAssembler``, for an answer whose reasoning is separate.

    Markers are part of neither text, nor are spaces around the reasoning.  Whatever may become a marker is held back,
    and turns into text if it does not.  Stop strings are looked for in the answer alone.

    Args:
        is_open: the prompt has begun the reasoning.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str], markers: ReasoningMarkers, *, is_open: bool) -> None:
        self._markers = markers
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = StringSearch(stop)
        self._end = StringSearch(markers.end)
        self._in_answer = StringSearch((*markers.dropped, *(markers.begin if markers.repeats else ())))
        self._state = _State.START
        self._held = ""
        """In ``START``, all text so far; in ``REASONING``, spaces that may be its last ones."""
        self._skips_spaces = False
        """Whether leading spaces are dropped."""
        self._parts: list[str] = []
        """The output as it was, without control tokens."""
        self._n_after_stop = 0
        self.n_reasoning_tokens = 0
        """Tokens of reasoning and its markers."""
        if is_open:
            self._begin()

    @property
    def matched(self) -> str | None:
        """The stop string that was found.  Neither it nor any later text is emitted."""
        return self._stop.matched

    @property
    def in_reasoning(self) -> bool:
        """Whether the output so far ends in reasoning."""
        return self._state is _State.REASONING

    @property
    def output(self) -> str:
        """Reasoning, markers that are text, and answer as they were generated, up to a stop string."""
        whole = "".join(self._parts)
        return whole[: len(whole) - self._n_after_stop]

    def feed(self, token: int, token_bytes: bytes) -> Split:
        """Append one token, and return the text that can be emitted now."""
        if self.matched is not None:
            return Split("", "")
        was_reasoning = self.in_reasoning
        control = self._markers.controls.get(token)
        text = self._decoder.decode(token_bytes, final=control is not None) + (control or "")
        split = self._split(text)
        self.n_reasoning_tokens += was_reasoning or self.in_reasoning
        return split

    def finish(self) -> Split:
        """Return the text that was held back, at the end of the output.  Incomplete bytes become U+FFFD."""
        if self.matched is not None:
            return Split("", "")
        reasoning, text = self._split(self._decoder.decode(b"", final=True))
        held, self._held = _visible(self._held), ""
        if self._state is _State.REASONING:
            return Split(reasoning + held + _visible(self._end.finish()), text)
        self._parts.append(held)
        text += self._answer_text(held + _visible(self._in_answer.finish()))
        return Split(reasoning, text if self.matched is not None else text + self._stop.finish())

    def _split(self, new: str) -> Split:
        reasoning = text = ""
        while new and self.matched is None:
            if self._state is _State.START:
                new = self._leave_start(new)
            elif self._state is _State.REASONING:
                found, new = self._take(self._end, new)
                reasoning += self._reasoning_text(found)
                if self._end.matched is not None:
                    self._end.restart()
                    self._state, self._held, self._skips_spaces = _State.ANSWER, "", True
            else:
                found, new = self._take(self._in_answer, new)
                text += self._answer_text(_visible(found))
                if (marker := self._in_answer.matched) is not None:
                    self._in_answer.restart()
                    if marker in self._markers.begin:
                        text += self._stop.finish()
                        self._begin()
        return Split(reasoning, text)

    def _leave_start(self, new: str) -> str:
        """Decide whether the output begins with reasoning, if that is known by now; returns the text that follows."""
        text = self._held + new
        self._held = ""
        begun = text.lstrip()
        for marker in self._markers.begin:
            if begun.startswith(marker):
                self._parts.append(_visible(text[: len(text) - len(begun)] + marker))
                self._begin()
                return begun[len(marker) :]
        if any(marker.startswith(begun) for marker in self._markers.begin):
            self._held = text
            return ""
        self._state = _State.ANSWER
        return text

    def _begin(self) -> None:
        self._state, self._held, self._skips_spaces = _State.REASONING, "", True

    def _take(self, search: StringSearch, new: str) -> tuple[str, str]:
        """Text of ``new`` that belongs to no marker, and what follows the first marker."""
        found = search.feed(new)
        rest = search.rest
        self._parts.append(_visible(new[: len(new) - len(rest)]))
        return found, rest

    def _reasoning_text(self, text: str) -> str:
        text = self._held + _visible(text)
        if self._skips_spaces:
            text = text.lstrip()
            self._skips_spaces = not text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown

    def _answer_text(self, text: str) -> str:
        if self._skips_spaces:
            text = text.lstrip()
            self._skips_spaces = not text
        shown = self._stop.feed(text)
        if self._stop.matched is not None:
            self._n_after_stop = len(self._stop.matched) + len(self._stop.rest)
        return shown


def _visible(text: str) -> str:
    """``text`` without the characters that stand for control tokens: like any control token they have no text."""
    return "".join(c for c in text if ord(c) not in CONTROL_CHARS)
