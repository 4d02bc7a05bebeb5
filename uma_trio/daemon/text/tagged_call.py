"""Calls of tools whose arguments stand between tags, read character by character."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from uma_trio.daemon.text.call_syntax import SPACES, CallSink, NotACall, checked_call, in_name
from uma_trio.grammar.argument_types import STRING, SchemaTypes, property_schema, read_json, read_value
from uma_trio.models.markers import CONTROL_CHARS, ParameterTags
from uma_trio.protocol.chat import MAX_TOOL_NAME_CHARS, ToolCall

MAX_KEY_CHARS: Final = 256


class TaggedCall:
    """The name of a tool, then each argument between tags.

    The arguments are passed on as JSON: strings while they come, other values when they are complete.  A value ends
    where its end tag is followed by another argument or by the end of the call.  So the text of an end tag inside a
    value ends nothing.

    Args:
        after_name: text between the name and the first argument.
    """

    def __init__(self, reader: CallSink, tags: ParameterTags, after_name: str) -> None:
        self._reader = reader
        self._tags = tags
        self._after_name = _plain(after_name)
        self._before_values: dict[str, Callable[[], bool]] = {_plain(tags.before_value): self._begin_value}
        if tags.before_json is not None:
            self._before_values[_plain(tags.before_json)] = self._begin_json
        after = _plain(tags.after_value)
        self._after_values = (tags.padding + after, after)
        self._state: Callable[[str], bool] = self._in_name
        self._awaited: Mapping[str, Callable[[], bool]] = {}
        """Tags that may come, and what follows from them."""
        self._held = ""
        """The beginning of a tag."""
        self._name = ""
        self._id: str | None = None
        self._parameters: Mapping[str, Any] = {}
        self._schemas = SchemaTypes({})
        self._arguments: dict[str, Any] = {}
        self._key: str | None = None
        """The key of the value that is being read, or that ended last."""
        self._types: frozenset[str] | None = STRING
        """Types that the value may have; ``None``: a tag says that it is JSON."""
        self._at_start = True
        """Whether padding may come."""
        self._value: list[str] = []
        self._after: list[str] = []
        """What followed the value so far: it belongs to the value unless a tag comes."""

    def step(self, c: str) -> bool:
        """As ``NamedCall.step``."""
        return self._state(c)

    def finish(self) -> ToolCall:
        """As ``NamedCall.finish``."""
        return checked_call(self._id, self._name, self._arguments)

    def _in_name(self, c: str) -> bool:
        if in_name(c) and len(self._name) < MAX_TOOL_NAME_CHARS:
            self._name += c
            return False
        self._id = self._reader.begin(self._name)
        self._parameters = self._reader.parameters_of(self._name)
        self._schemas = SchemaTypes(self._parameters)
        self._reader.add_arguments("{")
        if self._after_name:
            self._await({self._after_name: self._await_argument})
        else:
            self._await_argument()
        return self._state(c)

    # -- tags ------------------------------------------------------------------------------------

    def _await(self, tags: Mapping[str, Callable[[], bool]]) -> None:
        self._awaited, self._held, self._state = tags, "", self._in_tag

    def _await_argument(self) -> bool:
        self._await({_plain(self._tags.before_key): self._begin_key, _plain(self._tags.end_call): self._end_call})
        return False

    def _in_tag(self, c: str) -> bool:
        if self._after:
            self._after.append(c)
        held = self._held + c
        if held in self._awaited:
            return self._awaited[held]()
        if any(tag.startswith(held) for tag in self._awaited):
            self._held = held
        elif c not in SPACES:
            self._go_on_with_value()
        return False

    # -- arguments -------------------------------------------------------------------------------

    def _begin_key(self) -> bool:
        self._end_value()
        self._key, self._state = "", self._in_key
        return False

    def _in_key(self, c: str) -> bool:
        assert self._key is not None
        if any(tag[0] == c for tag in self._before_values):
            self._await(self._before_values)
            return self._state(c)
        if ord(c) in CONTROL_CHARS or len(self._key) == MAX_KEY_CHARS:
            raise NotACall
        self._key += c
        return False

    def _begin_value(self) -> bool:
        if self._tags.before_json is not None:
            return self._begin(STRING)
        key = (self._key or "").strip()
        return self._begin(self._schemas.of(property_schema(self._parameters, key)))

    def _begin_json(self) -> bool:
        return self._begin(None)

    def _begin(self, types: frozenset[str] | None) -> bool:
        key = self._key = (self._key or "").strip()
        if key in self._arguments or not key:
            raise NotACall
        self._types = types
        comma = "," if self._arguments else ""
        self._reader.add_arguments(f"{comma}{_json(key)}:")
        if self._streams:
            self._reader.add_arguments('"')
        self._held, self._at_start, self._value, self._state = "", True, [], self._in_value
        return False

    @property
    def _streams(self) -> bool:
        return self._types == STRING

    def _in_value(self, c: str) -> bool:
        held = self._held + c
        while held and not any(tag.startswith(held) for tag in self._after_values):
            self._add_to_value(held[0])
            held = held[1:]
        self._held = held
        if held in self._after_values:
            self._after = [*held]
            self._await_argument()
        return False

    def _add_to_value(self, c: str) -> None:
        if ord(c) in CONTROL_CHARS:
            raise NotACall
        at_start, self._at_start = self._at_start, False
        if at_start and c == self._tags.padding:
            return
        self._value.append(c)
        if self._streams:
            self._reader.add_arguments(c if c >= " " and c not in '"\\' else _json(c)[1:-1])

    def _go_on_with_value(self) -> None:
        """The value had not ended: neither an argument nor the end of the call came."""
        if not self._after:
            raise NotACall
        first, *rest = self._after
        self._after, self._held, self._state = [], "", self._in_value
        self._add_to_value(first)
        for c in rest:
            self._state(c)

    def _end_value(self) -> None:
        if self._key is None:
            return
        text = "".join(self._value)
        if self._streams:
            self._arguments[self._key] = text
            self._reader.add_arguments('"')
        else:
            value = read_json(text) if self._types is None else read_value(text, self._types)
            self._arguments[self._key] = value
            self._reader.add_arguments(_json(value))
        self._after = []

    def _end_call(self) -> bool:
        self._end_value()
        self._reader.add_arguments("}")
        return True


def _plain(tag: str) -> str:
    """``tag`` without its line breaks, which are optional."""
    return tag.replace("\n", "")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
