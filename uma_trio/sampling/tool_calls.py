"""Reads calls of tools from an output that comes in parts."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import attrs
import msgspec

from uma_trio.errors import BadRequest
from uma_trio.protocol.chat import MAX_TOOL_CALLS, MAX_TOOL_DEPTH, MAX_TOOL_NAME_CHARS, ToolCall, check_json
from uma_trio.sampling.gemma import InvalidNotation, decode_object
from uma_trio.sampling.markers import CONTROL_CHARS, CallMarkers

MAX_BETWEEN: Final = 128
"""Characters between the name and the arguments of a ``named`` call."""

_SEPARATORS: Final = frozenset(",;`")
"""What may stand between calls, or between a call and the end marker."""
_SPACES: Final = frozenset(" \t\r\n")
_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = frozenset({"name", *_ARGUMENTS, "type", "id"})


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
    tools: Collection[str]
    """Names of the tools.  A call of anything else is text."""
    parallel: bool = True
    """Whether the answer goes on after its first call."""
    make_id: Callable[[], str]
    """Makes an id that no other call of a conversation has."""


class State(enum.Enum):
    """Where a region of calls is."""

    OPEN = enum.auto()
    CLOSED = enum.auto()
    """It has ended; all its calls are complete."""
    FAILED = enum.auto()
    """What follows the last complete call is no call."""


class _Failed(Exception):
    """What was read is no call of a tool."""


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
        self.unread = begun
        """Text since the last complete call, or since the region began."""
        self._raw: list[str] = []
        self._deltas: list[CallDelta] = []
        self._end = ""
        """The beginning of an end marker."""
        self._in_list = False
        self._call: _ObjectCall | _NamedCall | None = None

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
            except _Failed:
                self.state = State.FAILED
            if self.state is not State.OPEN:
                self._keep_raw()
                return self._deltas, text[n:]
        self._keep_raw()
        return self._deltas, ""

    def finish(self) -> str:
        """The text of a call that was cut, at the end of the output."""
        return "" if self._call is None and self.calls else self.unread

    def _keep_raw(self) -> None:
        self.unread += "".join(self._raw)
        self._raw.clear()

    def _between(self, c: str) -> None:
        """Read a character outside of calls."""
        end = self._end + c
        if end in self._markers.end:
            self._leave()
            if self.calls:
                self._forget_raw()
            return
        if any(each.startswith(end) for each in self._markers.end):
            self._end = end
        elif self._end:
            self._leave()
        elif c in _SPACES:
            pass
        elif self._begins_call(c):
            if self.n_begun >= MAX_TOOL_CALLS:
                raise _Failed
            self._call = _NamedCall(self) if self._markers.named else _ObjectCall(self)
            self._call.step(c)
        elif c == "[" and not self.calls and not self._in_list and not self._markers.named:
            self._in_list = True
        elif c == "]" and self._in_list and self.calls:
            self._in_list = False
            self._forget_raw()
            if not self._markers.end:
                self.state = State.CLOSED
        elif not (self.calls and c in _SEPARATORS):
            self._leave()

    def _begins_call(self, c: str) -> bool:
        return _in_name(c) and not self.calls if self._markers.named else c == "{"

    def _leave(self) -> None:
        """End the region in front of something that does not belong to it."""
        self.state = State.CLOSED if self.calls else State.FAILED

    def _forget_raw(self) -> None:
        self.unread = ""
        self._raw.clear()

    def _complete(self) -> None:
        assert self._call is not None
        self.calls.append(self._call.finish())
        self._call = None
        self._forget_raw()
        if not self._calling.parallel:
            self.state = State.CLOSED

    # -- for calls ------------------------------------------------------------------------------

    @property
    def quote(self) -> str | None:
        return self._markers.quote

    def begin(self, name: str) -> str:
        """Announce a call; returns its id.

        Raises:
            _Failed: there is no such tool.
        """
        if name not in self._calling.tools:
            raise _Failed
        call_id = self._calling.make_id()
        self._deltas.append(CallDelta(self.n_begun, call_id=call_id, name=name))
        self.n_begun += 1
        return call_id

    def add_arguments(self, text: str) -> None:
        """Pass on arguments of the call that was announced last."""
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.arguments is not None and last.call == self.n_begun - 1:
            self._deltas[-1] = last._replace(arguments=last.arguments + text)
        else:
            self._deltas.append(CallDelta(self.n_begun - 1, arguments=text))


class _Nesting:
    """Follows brackets and strings of JSON, or of Gemma's notation."""

    def __init__(self, quote: str | None = None) -> None:
        self._quote = quote
        self._tail = ""
        self._escaped = False
        self.in_string = False
        self.depth = 0

    def step(self, c: str) -> None:
        """
        Raises:
            _Failed: nested too deeply, or a control token that is no quote.
        """
        if self._quote is None:
            self._step_json(c)
        else:
            self._tail = (self._tail + c)[-len(self._quote) :]
            if self._tail == self._quote:
                self.in_string, self._tail = not self.in_string, ""
                return
            if not self.in_string:
                self._bracket(c)
        if ord(c) in CONTROL_CHARS and c not in (self._quote or ""):
            raise _Failed

    def _step_json(self, c: str) -> None:
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == '"':
                self.in_string = False
        elif c == '"':
            self.in_string = True
        else:
            self._bracket(c)

    def _bracket(self, c: str) -> None:
        if c in "{[":
            self.depth += 1
            if self.depth > MAX_TOOL_DEPTH + 1:
                raise _Failed
        elif c in "}]":
            self.depth -= 1


class _NamedCall:
    """``name``, anything short, and the arguments as an object."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._name = ""
        self._n_between = 0
        self._id: str | None = None
        self._nesting = _Nesting(reader.quote)
        self._arguments: list[str] = []

    def step(self, c: str) -> bool:
        """Read a character; returns whether the call is complete.

        Raises:
            _Failed: this is no call.
        """
        if not self._arguments and c != "{":
            if _in_name(c) and not self._n_between:
                self._name += c
            else:
                self._n_between += 1
            if len(self._name) > MAX_TOOL_NAME_CHARS or self._n_between > MAX_BETWEEN:
                raise _Failed
            return False
        if not self._arguments:
            self._id = self._reader.begin(self._name)
        self._arguments.append(c)
        self._nesting.step(c)
        if self._reader.quote is None:
            self._reader.add_arguments(c)
        return self._nesting.depth == 0

    def finish(self) -> ToolCall:
        """
        Raises:
            _Failed: the arguments are no object.
        """
        text = "".join(self._arguments)
        if self._reader.quote is None:
            return _checked_call(self._id, self._name, _decoded(text))
        try:
            arguments = decode_object(text, self._reader.quote)
        except InvalidNotation:
            raise _Failed from None
        call = _checked_call(self._id, self._name, arguments)
        self._reader.add_arguments(msgspec.json.encode(arguments).decode())
        return call


class _ObjectCall:
    """A JSON object with the name and the arguments."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._nesting = _Nesting()
        self._text: list[str] = []
        self._key: str | None = None
        """The key whose value comes or is being read; ``None`` where a key comes."""
        self._part: list[str] = []
        """Text of the key or the value so far."""
        self._name: str | None = None
        self._id: str | None = None
        self._streams: str | None = None
        """The key whose value was passed on while it came."""

    def step(self, c: str) -> bool:
        """As ``_NamedCall.step``."""
        before = self._nesting.depth
        was_in_string = self._nesting.in_string
        self._nesting.step(c)
        self._text.append(c)
        if before == 0:
            return False  # the opening bracket
        at_top = before == 1 and not was_in_string
        if self._key is None:
            if at_top and c == ":":
                self._key = self._checked_key("".join(self._part))
                self._part = []
            else:
                self._part.append(c)
        elif at_top and c in ",}":
            self._end_value()
        elif self._part or c not in _SPACES:
            self._part.append(c)
            self._pass_on(c)
        return self._nesting.depth == 0

    def _checked_key(self, text: str) -> str:
        key = text.strip()[1:-1]
        if key not in _KEYS:
            raise _Failed
        return key

    def _end_value(self) -> None:
        if self._key == "name":
            name = _decoded("".join(self._part))
            if not isinstance(name, str) or self._name is not None:
                raise _Failed
            self._name = name
            self._id = self._reader.begin(name)
        self._key, self._part = None, []

    def _pass_on(self, c: str) -> None:
        """Pass a character of the arguments on, if the name is known and they are an object."""
        if self._name is None or self._key not in _ARGUMENTS or self._part[0] != "{":
            return
        if self._streams not in (None, self._key) or (self._streams is not None and len(self._part) == 1):
            raise _Failed  # arguments twice
        self._streams = self._key
        if c not in _SPACES or self._nesting.depth > 1:  # not what follows them
            self._reader.add_arguments(c)

    def finish(self) -> ToolCall:
        """As ``_NamedCall.finish``."""
        whole = _decoded("".join(self._text))
        if not isinstance(whole, dict) or self._name is None or whole.get("name") != self._name:
            raise _Failed
        arguments: Any = next((whole[key] for key in _ARGUMENTS if whole.get(key) is not None), {})
        if self._streams is not None and arguments != whole[self._streams]:
            raise _Failed
        if isinstance(arguments, str):  # written twice: JSON in a string of JSON
            arguments = _decoded(arguments) if arguments.strip() else {}
        call = _checked_call(self._id, self._name, arguments)
        if self._streams is None:
            self._reader.add_arguments(msgspec.json.encode(arguments).decode())
        return call


def _in_name(c: str) -> bool:
    """Whether the name of a tool may have this character."""
    return c.isascii() and (c.isalnum() or c in "_.:/-")


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise _Failed from None


def _checked_call(call_id: str | None, name: str, arguments: Any) -> ToolCall:
    """A call that can be sent to a client, and back."""
    if not isinstance(arguments, dict):
        raise _Failed
    try:
        check_json(arguments, "arguments", MAX_TOOL_DEPTH)
        msgspec.json.encode(arguments)
    except (BadRequest, OverflowError, msgspec.MsgspecError):
        raise _Failed from None
    return ToolCall(id=call_id, name=name, arguments=arguments)
