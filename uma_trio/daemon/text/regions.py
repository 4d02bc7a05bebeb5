"""Divides an output into its regions: reasoning, calls of tools, and the text of the answer."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from uma_trio.daemon.text.assembler import Split, StringSearch, TextAssembler
from uma_trio.daemon.text.tool_calls import CallReader, State, ToolCalling
from uma_trio.models.markers import CONTROL_CHARS, OTHER_CONTROL, ReasoningMarkers, visible


class _Region(enum.Enum):
    START = enum.auto()
    """Nothing but spaces, or the beginning of a marker that counts only here."""
    REASONING = enum.auto()
    ANSWER = enum.auto()
    CALLS = enum.auto()


class RegionAssembler(TextAssembler):
    """Text of an output with reasoning, calls of tools, or both.

    Markers are part of neither text, nor are spaces around reasoning and calls.  Whatever may become a marker is held
    back, and turns into text if it does not.  Stop strings are looked for in the answer alone.  A call that is cut, or
    no call of a tool after all, is text of the answer.

    Args:
        reasoning: ``None``: what the model thinks is text.
        calling: ``None``: calls are text.
        is_open: the prompt has begun the reasoning.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(
        self,
        stop: Sequence[str],
        reasoning: ReasoningMarkers | None,
        calling: ToolCalling | None = None,
        *,
        is_open: bool,
    ) -> None:
        super().__init__(stop)
        calls = None if calling is None else calling.markers
        self._calling = calling
        self.may_end |= calling is not None and not calling.parallel  # the only call does
        self._begins_reasoning = () if reasoning is None else reasoning.begin
        self._begins_again = self._begins_reasoning if reasoning is not None and reasoning.repeats else ()
        """What begins reasoning later in the output."""
        self._begins_calls = () if calls is None else calls.begin
        self._bare_calls = calls is not None and calls.bare
        self._controls = {
            **(reasoning.controls if reasoning is not None else {}),
            **(calls.controls if calls is not None else {}),
        }
        self._end = StringSearch(() if reasoning is None else reasoning.end)
        self._in_answer = StringSearch(
            (
                *(reasoning.dropped if reasoning is not None else ()),
                *(calls.dropped if calls is not None else ()),
                *self._begins_again,
                *self._begins_calls,
            )
        )
        self._region = _Region.START
        self._begins = self._begins_reasoning
        """What begins reasoning while the region is ``START``."""
        self._held = ""
        """In ``START``, all text so far; in ``REASONING``, spaces that may end it; in the answer, spaces before its next text."""
        self._skips_spaces = False
        """Whether leading spaces are dropped."""
        self._parts: list[str] = []
        """The output as it was, without control tokens."""
        self._n_after_stop = 0
        self._reader: CallReader | None = None
        self._n_calls_begun = 0
        if is_open:
            self._begin_reasoning()

    @property
    def has_ended(self) -> bool:
        """Whether nothing that follows is part of the answer: after a stop string, or after the only call."""
        return self.matched is not None or (
            self._calling is not None and not self._calling.parallel and bool(self.calls)
        )

    @property
    def in_reasoning(self) -> bool:
        """Whether the output so far ends in reasoning."""
        return self._region is _Region.REASONING

    @property
    def is_undecided(self) -> bool:
        """Whether the output so far ends inside a character, or inside what may be a marker."""
        if self._region is _Region.START:
            begun = bool(self._held.strip())
        else:
            begun = (self._end if self.in_reasoning else self._in_answer).holds_text
        return begun or bool(self._decoder.getstate()[0])

    @property
    def tokens_to_reasoning(self) -> float:
        """After how many tokens the output may be in reasoning at the earliest: 0 if it is, infinite if it cannot be."""
        if self.in_reasoning:
            return 0
        begins = self._begins if self._region is _Region.START else ()
        if not begins and not self._begins_again:
            return math.inf
        is_near = self.is_undecided or self.in_calls or not all(map(_has_several_tokens, self._begins_reasoning))
        return 1 if is_near else 2

    def output(self, shown: str) -> str:
        """Reasoning, calls, markers that are text, and answer as they were generated, up to a stop string."""
        whole = "".join(self._parts)
        return whole[: len(whole) - self._n_after_stop]

    def feed(self, token: int, token_bytes: bytes) -> Split:
        """Append one token, and return what can be emitted now."""
        if self.has_ended:
            return Split()
        was_reasoning = self.in_reasoning
        control = self._controls.get(token)
        if control is None and not token_bytes and self.in_calls:
            control = OTHER_CONTROL
        text = self._decoder.decode(token_bytes, final=control is not None) + (control or "")
        split = self._split(text)
        self.n_reasoning_tokens += was_reasoning or self.in_reasoning
        return split

    def finish(self) -> Split:
        """Return what was held back, at the end of the output.  Incomplete bytes become U+FFFD."""
        if self.has_ended:
            return Split()
        split = self._split(self._decoder.decode(b"", final=True))
        if self.has_ended:
            return split
        if self._reader is not None:
            cut = self._reader.finish()
            return split + Split(text=self._held + visible(cut) if cut else "")
        held = visible(self._held)
        if self._region is _Region.REASONING:
            return split + Split(reasoning=held + visible(self._end.finish()))
        text = ""
        if self._region is _Region.START:
            self._held = ""
            self._parts.append(held)
            text = self._answer_text(held)
        text += self._answer_text(visible(self._in_answer.finish()))
        if self.matched is None:
            text += self._spaced(self._stop.finish())
            if not self._skips_spaces:  # no call came last
                text += self._held
        return split + Split(text=text)

    def _split(self, new: str) -> Split:
        split = Split()
        while new and not self.has_ended:
            if self._region is _Region.START:
                new = self._leave_start(new)
            elif self._region is _Region.REASONING:
                reasoning, new = self._take(self._end, new)
                split += Split(reasoning=self._reasoning_text(reasoning))
                if self._end.matched is not None:
                    self._end.restart()
                    self._region, self._held, self._skips_spaces = _Region.START, "", True
                    self._begins = ()
            elif self._region is _Region.CALLS:
                found_split, new = self._read_calls(new)
                split += found_split
            else:
                answer, new = self._take(self._in_answer, new)
                text = self._answer_text(visible(answer))
                if (marker := self._in_answer.matched) is not None:
                    self._in_answer.restart()
                    if marker in self._begins_calls:
                        text += self._spaced(self._stop.finish())
                        self._begin_calls(marker)
                    elif marker in self._begins_reasoning:
                        text += self._spaced(self._stop.finish()) + self._held
                        self._begin_reasoning()
                split += Split(text=text)
        return split

    def _leave_start(self, new: str) -> str:
        """Decide whether the output begins with reasoning or a bare call, if that is known by now.

        Returns:
            The text that follows.
        """
        text = self._held + new
        self._held = ""
        begun = text.lstrip()
        for marker in self._begins:
            if begun.startswith(marker):
                self._parts.append(visible(text[: len(text) - len(begun)] + marker))
                self._begin_reasoning()
                return begun[len(marker) :]
        if any(marker.startswith(begun) for marker in self._begins) or (self._bare_calls and not begun):
            self._held = text
            return ""
        self._region = _Region.ANSWER
        if self._bare_calls and begun.startswith("{"):
            self._parts.append(text[: len(text) - len(begun)])
            self._held = "" if self._skips_spaces else text[: len(text) - len(begun)]
            self._begin_calls("")
            return begun
        return text

    def _begin_reasoning(self) -> None:
        self._region, self._held, self._skips_spaces = _Region.REASONING, "", True

    def _begin_calls(self, marker: str) -> None:
        assert self._calling is not None
        self._region, self.in_calls = _Region.CALLS, True
        self._reader = CallReader(self._calling, marker, self._n_calls_begun)

    def _read_calls(self, new: str) -> tuple[Split, str]:
        """Read calls; returns what is new, and the text that follows them."""
        reader = self._reader
        assert reader is not None
        n_before = len(reader.calls)
        deltas, rest = reader.feed(new)
        self._parts.append(visible(new[: len(new) - len(rest)]))
        self._n_calls_begun = reader.n_begun
        if ended := reader.calls[n_before:]:
            self.calls += ended
            self._skips_spaces = True
        if reader.state is State.OPEN or self.has_ended:
            return Split(calls=deltas), rest
        self._reader, self._region, self.in_calls = None, _Region.ANSWER, False
        unread = reader.unread
        text = ""
        if reader.state is State.FAILED:  # its last character may begin a marker
            text, unread = self._held + visible(unread[:-1]), unread[-1:]
            self._held, self._skips_spaces = "", False
        last = visible(unread)
        if last:  # it comes again
            self._parts = ["".join(self._parts).removesuffix(last)]
        return Split(text=text, calls=deltas), unread + rest

    def _take(self, search: StringSearch, new: str) -> tuple[str, str]:
        """Text of ``new`` that belongs to no marker, and what follows the first marker."""
        before = search.feed(new)
        rest = search.rest
        self._parts.append(visible(new[: len(new) - len(rest)]))
        return before, rest

    def _reasoning_text(self, text: str) -> str:
        text = self._held + visible(text)
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
        shown = self._spaced(self._stop.feed(text))
        if self._stop.matched is not None:
            self._n_after_stop = len(self._stop.matched) + len(self._stop.rest)
            shown += self._held
        return shown

    def _spaced(self, text: str) -> str:
        """``text`` with the spaces before it, and without those at its end: perhaps a call follows."""
        if self._calling is None or not text:
            return text
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown


def make_assembler(
    stops: Sequence[str], reasoning: ReasoningMarkers | None, calling: ToolCalling | None, *, is_open: bool
) -> TextAssembler:
    """The assembler that an answer needs.

    Args:
        reasoning: ``None``: the model marks no reasoning.
        calling: ``None``: no tools can be called.
        is_open: the prompt has begun the reasoning.
    """
    if reasoning is None and calling is None:
        return TextAssembler(stops)
    return RegionAssembler(stops, reasoning, calling, is_open=is_open)


def _has_several_tokens(marker: str) -> bool:
    """Whether a marker cannot be a single token: it has a control token, and more."""
    return len(marker) > 1 and any(ord(character) in CONTROL_CHARS for character in marker)
