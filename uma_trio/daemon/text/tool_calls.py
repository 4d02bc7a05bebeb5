"""Reads calls of tools from an output that comes in parts."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import attrs

from uma_trio.daemon.text.call_syntax import SPACES, NamedCall, NotACall, ObjectCall, in_name
from uma_trio.daemon.text.tagged_call import TaggedCall
from uma_trio.models.markers import CallMarkers
from uma_trio.protocol.chat import MAX_TOOL_CALLS, ToolCall

_SEPARATORS: Final = frozenset(",;`")
"""What may stand between calls, or between a call and the end marker."""


class CallDelta(NamedTuple):
    """A part of a call, as in the protocol's ``ToolCallDelta``."""

    call: int
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


@attrs.frozen(kw_only=True)
class ToolCalling:
    """Which calls an answer may have."""

    markers: CallMarkers
    tools: Mapping[str, Mapping[str, Any]]
    """Names of the tools, each with the JSON schema of its arguments.  A call of anything else is text."""
    parallel: bool = True
    """Whether the answer goes on after its first call."""
    make_id: Callable[[int], str]
    """Makes an id that no other call of a conversation has, for the call with this number in the answer."""


class State(enum.Enum):
    """Where a region of calls is."""

    OPEN = enum.auto()
    CLOSED = enum.auto()
    """It has ended; all its calls are complete."""
    FAILED = enum.auto()
    """What follows the last complete call is no call."""


class CallReader:
    """Reads the calls of one region.

    Args:
        begun: the text that began the region.
        n_before: calls of the answer before this region, cut ones included.
    """

    def __init__(self, calling: ToolCalling, begun: str, n_before: int) -> None:
        self._calling = calling
        self._markers = calling.markers
        self.n_begun = n_before
        """Calls of the answer that have begun so far."""
        self.state = State.OPEN
        self.calls: list[ToolCall] = []
        """The complete calls of this region."""
        self._raw = [begun]
        self._deltas: list[CallDelta] = []
        self._arguments: list[str] = []
        """Arguments that are no delta yet."""
        self._end = ""
        """The beginning of an end marker."""
        self._in_list = False
        self._call: ObjectCall | NamedCall | TaggedCall | None = None
        tags = self._markers.tags
        self._begins_call = None if tags is None else tags.begin_call
        """Comes before the name in calls with tags."""
        if begun and begun == self._begins_call:  # the marker of the region was left out
            self._call = self._new_call()

    def feed(self, text: str) -> tuple[list[CallDelta], str]:
        """Read on; returns new parts of calls, and the text that was not read, because the region has ended."""
        self._deltas = []
        for n, c in enumerate(text, 1):
            self._raw.append(c)
            try:
                if self._call is None:
                    self._between(c)
                elif self._call.step(c):
                    self._complete()
            except NotACall:
                self.state = State.FAILED
            if self.state is not State.OPEN:
                self._flush()
                return self._deltas, text[n:]
        self._flush()
        return self._deltas, ""

    def finish(self) -> str:
        """The text of a call that was cut, at the end of the output."""
        return "" if self._call is None and self.calls else self.unread

    @property
    def unread(self) -> str:
        """Text since the last complete call, or since the region began."""
        return "".join(self._raw)

    def _between(self, c: str) -> None:
        """Read a character outside of calls."""
        end = self._end + c
        if end in self._markers.end:
            self._leave()
            if self.calls:
                self._raw.clear()
            return
        if self._begins_call and end == self._begins_call:
            self._end = ""
            self._call = self._new_call()
        elif any(marker.startswith(end) for marker in (*self._markers.end, self._begins_call or "")):
            self._end = end
        elif self._end:
            self._leave()
        elif c in SPACES:
            pass
        elif self._is_first_of_call(c):
            self._call = self._new_call()
            self._call.step(c)
        elif c == "[" and not self.calls and not self._in_list and self._has_objects:
            self._in_list = True
        elif c == "]" and self._in_list and self.calls:
            self._in_list = False
            self._raw.clear()
            if not self._markers.end:
                self.state = State.CLOSED
        elif not (self.calls and c in _SEPARATORS):
            self._leave()

    @property
    def _has_objects(self) -> bool:
        return not self._markers.named and self._markers.tags is None

    def _is_first_of_call(self, c: str) -> bool:
        if self._has_objects:
            return c == "{"
        return not self._begins_call and in_name(c) and not self.calls

    def _new_call(self) -> ObjectCall | NamedCall | TaggedCall:
        if self._markers.tags is not None:
            return TaggedCall(self, self._markers.tags, after_name=self._markers.written[1])
        return NamedCall(self, self._markers) if self._markers.named else ObjectCall(self)

    def _leave(self) -> None:
        """End the region in front of something that does not belong to it."""
        self.state = State.CLOSED if self.calls else State.FAILED

    def _complete(self) -> None:
        assert self._call is not None
        self.calls.append(self._call.finish())
        self._call = None
        self._raw.clear()
        if not self._calling.parallel:
            self.state = State.CLOSED

    # -- for calls ------------------------------------------------------------------------------

    def begin(self, name: str) -> str:
        """As ``CallSink.begin``."""
        if name not in self._calling.tools or self.n_begun >= MAX_TOOL_CALLS:
            raise NotACall
        call_id = self._calling.make_id(self.n_begun)
        self._flush()
        self._deltas.append(CallDelta(self.n_begun, call_id=call_id, name=name))
        self.n_begun += 1
        return call_id

    def add_arguments(self, text: str) -> None:
        """As ``CallSink.add_arguments``."""
        self._arguments.append(text)

    def parameters_of(self, name: str) -> Mapping[str, Any]:
        """As ``CallSink.parameters_of``."""
        return self._calling.tools[name]

    def _flush(self) -> None:
        if self._arguments:
            self._deltas.append(CallDelta(self.n_begun - 1, arguments="".join(self._arguments)))
            self._arguments.clear()
