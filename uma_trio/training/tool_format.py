"""Tools, calls and results as text, in the format of Hermes and Qwen.

The four markers are control tokens of the vocabulary.  In a ``Sample``, a turn's answer may be calls, and its question
may be their results; both are the text that the template writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
MARKERS = (CALL, CALL_END, RESULT, RESULT_END)

INTRODUCTION = "# Tools\n\nYou can call these functions:\n<tools>"
INSTRUCTION = (
    "</tools>\n\nIf one of them fits, answer with a call, a JSON object between these markers:\n"
    f'{CALL}\n{{"name": <name of the function>, "arguments": <object of arguments>}}\n{CALL_END}'
)


def written(value: object) -> str:
    """JSON as the template's ``tojson`` writes it: on one line, without ASCII escapes."""
    return json.dumps(value, ensure_ascii=False)


def system_text(system: str, tools: Iterable[str]) -> str:
    """The system message of a chat with tools, each given as JSON."""
    before = f"{system}\n\n" if system else ""
    return "\n".join((before + INTRODUCTION, *tools, INSTRUCTION))


def calls_text(calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls, each a name and arguments, as an answer has them."""
    return "\n".join(
        f"{CALL}\n{written({'name': name, 'arguments': arguments})}\n{CALL_END}" for name, arguments in calls
    )


def parse_calls(answer: str) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls of an answer, each a name and arguments; ``None`` if the answer is anything else."""
    if not (answer.startswith(f"{CALL}\n") and answer.endswith(f"\n{CALL_END}")):
        return None
    inside = answer.removeprefix(f"{CALL}\n").removesuffix(f"\n{CALL_END}")
    calls = []
    for body in inside.split(f"\n{CALL_END}\n{CALL}\n"):
        try:
            call = json.loads(body)
            calls.append((call["name"], call["arguments"]))
        except (ValueError, TypeError, KeyError):
            return None
    return calls


def results_text(results: Iterable[str]) -> str:
    """What tools returned, as the user's turn has it."""
    return "\n".join(f"{RESULT}\n{result}\n{RESULT_END}" for result in results)


def parse_results(question: str) -> list[str] | None:
    """What tools returned, from a user's turn; ``None`` if the turn is anything else."""
    if not question.startswith(RESULT):
        return None
    inside = question.removeprefix(f"{RESULT}\n").removesuffix(f"\n{RESULT_END}")
    return inside.split(f"\n{RESULT_END}\n{RESULT}\n")
