"""Samples of the training text as clients send them."""

from __future__ import annotations

from typing import Any

from uma_trio.training.sample import Sample
from uma_trio.training.tool_format import parse_calls, parse_results


def messages_of(sample: Sample) -> list[dict[str, Any]]:
    """The messages of a chat, with calls and results as OpenAI's API has them, arguments as an object."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": sample.system}] if sample.system else []
    for turn in sample.turns:
        results = parse_results(turn.question)
        if results is None:
            messages.append({"role": "user", "content": turn.question})
        else:
            messages += [{"role": "tool", "content": result} for result in results]
        calls = parse_calls(turn.answer)
        if calls is None:
            messages.append({"role": "assistant", "content": turn.answer})
        else:
            tool_calls = [
                {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
            ]
            messages.append({"role": "assistant", "content": "", "tool_calls": tool_calls})
    return messages
