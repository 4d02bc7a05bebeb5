"""The options that offer tools to the model, and the line that a call is printed as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from uma_trio.cli.constraint import read_given

if TYPE_CHECKING:
    from uma_trio.protocol.chat import ToolCall

CHOICES = ("auto", "none", "required")


def tool_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that offer tools; empty if no option does.

    Raises:
        click.UsageError: the file cannot be used.
    """
    choice = options["tool_choice"]
    if options["tools"] is None:
        if choice is not None:
            raise click.UsageError("--tool-choice chooses among tools; add --tools FILE")
        return {}
    fields: dict[str, Any] = {"tools": _tools(options["tools"])}
    if choice is not None:
        fields["tool_choice"] = choice if choice in CHOICES else {"name": choice}
    return fields


def _tools(file: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(read_given(file, "--tools"))
    except ValueError as error:
        raise click.UsageError(f"--tools: {file} is not valid JSON: {error}") from None
    tools = found.get("tools") if isinstance(found, dict) else found
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise click.UsageError(
            f'--tools: {file} must be a list of tools, each {{"name": ..., "description": ..., "parameters": ...}}'
        )
    return [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]


def call_line(call: ToolCall) -> str:
    """A call as JSON on one line."""
    return json.dumps({"id": call.id, "name": call.name, "arguments": call.arguments}, ensure_ascii=False)
