"""Calls of tools whose arguments are one object, read character by character."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from uma_trio.daemon.text.gemma import InvalidNotation, decode_object
from uma_trio.errors import BadRequest
from uma_trio.models.markers import CONTROL_CHARS, CallMarkers
from uma_trio.protocol.chat import MAX_TOOL_DEPTH, MAX_TOOL_NAME_CHARS, ToolCall, check_json

MAX_BETWEEN: Final = 128
"""Characters between the name and the arguments of a ``named`` call."""

SPACES: Final = frozenset(" \t\r\n")
_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = frozenset({"name", *_ARGUMENTS, "type", "id"})
_NUMBERED: Final = re.compile(r"(?:functions\.)?(.*?)(?::[0-9]+)?")


class NotACall(Exception):
    """What was read is no call of a tool."""


class CallSink(Protocol):
    """Where the parts of a call go."""

    def begin(self, name: str) -> str:
        """Announce a call; returns its id.

        Raises:
            NotACall: there is no such tool.
        """

    def add_arguments(self, text: str) -> None:
        """Pass on arguments of the call that was announced last."""

    def parameters_of(self, name: str) -> Mapping[str, Any]:
        """JSON schema of the arguments of a tool that was announced."""


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
            NotACall: nested too deeply, or a control token that is no quote.
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
            raise NotACall

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
                raise NotACall
        elif c in "}]":
            self.depth -= 1


class NamedCall:
    """``name``, anything short, and the arguments as an object."""

    def __init__(self, reader: CallSink, markers: CallMarkers) -> None:
        self._reader = reader
        self._quote = markers.quote
        self._numbered = markers.numbered
        self._name = ""
        self._n_between = 0
        self._id: str | None = None
        self._nesting = _Nesting(markers.quote)
        self._arguments: list[str] = []

    def step(self, c: str) -> bool:
        """Read a character; returns whether the call is complete.

        Raises:
            NotACall: this is no call.
        """
        if not self._arguments and c != "{":
            if in_name(c) and not self._n_between:
                self._name += c
            else:
                self._n_between += 1
            if len(self._name) > MAX_TOOL_NAME_CHARS or self._n_between > MAX_BETWEEN:
                raise NotACall
            return False
        if not self._arguments:
            if self._numbered and (parts := _NUMBERED.fullmatch(self._name)):
                self._name = parts[1]
            self._id = self._reader.begin(self._name)
        self._arguments.append(c)
        self._nesting.step(c)
        if self._quote is None:
            self._reader.add_arguments(c)
        return self._nesting.depth == 0

    def finish(self) -> ToolCall:
        """
        Raises:
            NotACall: the arguments are not an object.
        """
        text = "".join(self._arguments)
        if self._quote is None:
            return checked_call(self._id, self._name, _decoded(text))
        try:
            arguments = decode_object(text, self._quote)
        except InvalidNotation:
            raise NotACall from None
        call = checked_call(self._id, self._name, arguments)
        self._reader.add_arguments(msgspec.json.encode(arguments).decode())
        return call


class ObjectCall:
    """A JSON object with the name and the arguments."""

    def __init__(self, reader: CallSink) -> None:
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
        """As ``NamedCall.step``."""
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
        elif self._part or c not in SPACES:
            self._part.append(c)
            self._pass_on(c)
        return self._nesting.depth == 0

    def _checked_key(self, text: str) -> str:
        key = text.strip()[1:-1]
        if key not in _KEYS:
            raise NotACall
        return key

    def _end_value(self) -> None:
        if self._key == "name":
            name = _decoded("".join(self._part))
            if not isinstance(name, str) or self._name is not None:
                raise NotACall
            self._name = name
            self._id = self._reader.begin(name)
        self._key, self._part = None, []

    def _pass_on(self, c: str) -> None:
        """Pass a character of the arguments on, if the name is known and they are an object."""
        if self._name is None or self._key not in _ARGUMENTS or self._part[0] != "{":
            return
        if self._streams not in (None, self._key) or (self._streams is not None and len(self._part) == 1):
            raise NotACall  # arguments twice
        self._streams = self._key
        if c not in SPACES or self._nesting.depth > 1:  # not what follows them
            self._reader.add_arguments(c)

    def finish(self) -> ToolCall:
        """As ``NamedCall.finish``."""
        whole = _decoded("".join(self._text))
        if not isinstance(whole, dict) or self._name is None or whole.get("name") != self._name:
            raise NotACall
        arguments: Any = next((whole[key] for key in _ARGUMENTS if whole.get(key) is not None), {})
        if self._streams is not None and arguments != whole[self._streams]:
            raise NotACall
        if isinstance(arguments, str):  # written twice: JSON in a string of JSON
            arguments = _decoded(arguments) if arguments.strip() else {}
        call = checked_call(self._id, self._name, arguments)
        if self._streams is None:
            self._reader.add_arguments(msgspec.json.encode(arguments).decode())
        return call


def in_name(c: str) -> bool:
    """Whether the name of a tool may have this character."""
    return c.isascii() and (c.isalnum() or c in "_.:/-")


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise NotACall from None


def checked_call(call_id: str | None, name: str, arguments: Any) -> ToolCall:
    """A call that can be sent to a client, and back."""
    if not isinstance(arguments, dict):
        raise NotACall
    try:
        check_json(arguments, "arguments", MAX_TOOL_DEPTH)
        msgspec.json.encode(arguments)
    except (BadRequest, OverflowError, msgspec.MsgspecError):
        raise NotACall from None
    return ToolCall(id=call_id, name=name, arguments=arguments)
