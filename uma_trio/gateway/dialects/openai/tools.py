"""Tools in OpenAI's API: which of them the model may or must call, and the calls of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from uma_trio.client import ToolCall, ToolCallDelta
from uma_trio.gateway.dialects.common.tools import Tool, offered_tools
from uma_trio.gateway.dialects.openai.shapes import Call, CallDelta, CalledFunction, FunctionDelta
from uma_trio.gateway.errors import invalid

CHOICES: Final = "'auto', 'none', 'required', or {'type': 'function', 'function': {'name': ...}}"


def tool_fields(
    tools: Sequence[Tool] | None, choice: str | dict[str, Any] | None, warnings: list[str]
) -> dict[str, Any]:
    """The fields of the socket protocol; adds a warning for each tool that is skipped.

    Raises:
        HttpError: the choice is not possible.
    """
    offered = offered_tools(tools or (), warnings)
    if isinstance(choice, dict):
        allowed, choice = _choice(choice)
        if allowed is not None:
            offered = [tool for tool in offered if tool["name"] in allowed]
    elif choice not in (None, "auto", "none", "required"):
        raise invalid(f"tool_choice must be {CHOICES}", parameter="tool_choice")
    return {"tools": offered or None, "tool_choice": choice}


def _choice(choice: dict[str, Any]) -> tuple[frozenset[str] | None, str | dict[str, str]]:
    """The names of the tools that may be called, ``None`` for all, and the choice of the socket protocol."""
    match choice:
        case {"type": "function", "function": {"name": str() as name}} | {"type": "function", "name": str() as name}:
            return None, {"name": name}
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list() as tools},
        }:
            names = [_allowed_name(tool) for tool in tools]
            return frozenset(name for name in names if name is not None), mode
    raise invalid(f"tool_choice must be {CHOICES}", parameter="tool_choice")


def _allowed_name(tool: Any) -> str | None:
    match tool:
        case {"function": {"name": str() as name}} | {"name": str() as name}:
            return name
    return None


def whole_calls(calls: Sequence[ToolCall]) -> list[Call]:
    """The calls of an answer."""
    encode = msgspec.json.encode
    return [
        Call(id=call.id, function=CalledFunction(name=call.name, arguments=encode(call.arguments).decode()))
        for call in calls
    ]


def call_delta(event: ToolCallDelta) -> CallDelta:
    """A part of a call: id and name in the first one, arguments in the others."""
    function = FunctionDelta(arguments=event.arguments or "")
    if event.name is None:
        return CallDelta(index=event.call, function=function)
    function.name = event.name
    return CallDelta(index=event.call, function=function, id=event.call_id, type="function")
