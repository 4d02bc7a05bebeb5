"""Tools that a request offers, as OpenAI's API has them, and Ollama's and local servers' after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

TOOL_NAMES: Final = {
    "tools[].name": "tools[].function.name",
    "tools[].description": "tools[].function.description",
    "tools[].parameters": "tools[].function.parameters",
}
"""Where the tools of the socket protocol come from."""


class Function(msgspec.Struct):
    """A function that the client offers to the model."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Has no effect."""


class Tool(msgspec.Struct):
    """A tool of a request.  Only functions are supported; others are skipped."""

    type: str = "function"
    function: Function | None = None


def offered_tools(tools: Sequence[Tool], warnings: list[str]) -> list[dict[str, Any]]:
    """Tools of the socket protocol; adds a warning for each that is skipped."""
    offered = []
    for index, tool in enumerate(tools):
        if tool.type != "function":
            warnings.append(f"tools[{index}] was skipped: only functions are supported, and it is {tool.type!r}")
            continue
        if (function := tool.function) is None:
            warnings.append(f"tools[{index}] was skipped: it has no function")
            continue
        offered.append(
            {
                "name": function.name,
                "description": function.description or "",
                "parameters": function.parameters or {},
            }
        )
    return offered
