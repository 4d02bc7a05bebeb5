"""Grammar of an answer that reasons or calls tools, in llguidance's Lark, from the markers with which it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

from uma_trio.grammar.checker import MAX_SOURCE_BYTES
from uma_trio.grammar.tagged_arguments import any_text, argument_rules
from uma_trio.grammar.terms import has_control, json_expression, literal
from uma_trio.models.markers import CallMarkers, ReasoningMarkers
from uma_trio.protocol.chat import Tool
from uma_trio.protocol.requests import Constraint

_GEMMA_VALUE: Final = r"""
value: string | NUMBER | "true" | "false" | "null" | object | list
object: "{" (pair ("," pair)*)? "}"
pair: KEY ":" value
list: "[" (value ("," value)*)? "]"
KEY: /[A-Za-z0-9_]{1,64}/
NUMBER: /-?[0-9]{1,15}(\.[0-9]{1,15})?/
TEXT: /(.|\n){0,4096}/
"""


@attrs.frozen(kw_only=True)
class AnswerShape:
    """What an answer may be: reasoning, then calls of tools, or text."""

    markers: CallMarkers | None = None
    """How the model writes calls; ``None``: the answer is text."""
    tools: Sequence[Tool] = ()
    """The tools that it may call."""
    parallel: bool = True
    """Whether it may have several calls."""
    text: Constraint | None = None
    """What text may be instead of calls; ``None``: there must be a call."""
    reasoning: ReasoningMarkers | None = None
    """How the model marks reasoning before it."""
    is_open: bool = False
    """Whether the prompt has begun the reasoning."""

    @property
    def controls(self) -> dict[str, int]:
        """Characters in markers, and the control tokens for which they stand."""
        controls = [markers.controls for markers in (self.markers, self.reasoning) if markers is not None]
        return {character: token for characters in controls for token, character in characters.items()}


def answer_rules(shape: AnswerShape, text: str | None) -> str:
    """The grammar; incomplete if it has more than ``MAX_SOURCE_BYTES``.

    Args:
        text: expression for ``shape.text``.
    """
    controls, markers, rules = shape.controls, shape.markers, []
    kinds = ([_calls(shape, markers, controls)] if markers is not None else []) + (["text"] if text is not None else [])
    if shape.reasoning is None:
        rules.append("start: answer")
    else:
        dropped = "dropped*" if shape.reasoning.dropped else ""
        rules.append(f"start: {'thought' if shape.is_open else '(begins thought)?'} {dropped} answer")
        rules += _reasoning(shape.reasoning, controls)
    rules.append(f"answer: {' | '.join(kinds)}")
    if text is not None:
        rules.append(f"text: {text}")
    if markers is not None:
        rules.append(f"call: {' | '.join(f'call_{n}' for n in range(len(shape.tools)))}")
        before, between, after = (_written(part, markers, controls) for part in markers.written)
        number = '":" NUMBER_OF_CALL' if markers.numbered else ""
        n_chars = 0
        for n, tool in enumerate(shape.tools):
            rules.append(f"call_{n}: {before} {json.dumps(tool.name)} {number} {between} arguments_{n} {after}")
            if markers.tags is not None:
                for rule in argument_rules(f"arguments_{n}", tool, markers.tags, controls):
                    rules.append(rule)
                    n_chars += len(rule)
                    if n_chars > MAX_SOURCE_BYTES:  # too many anyway, and each may repeat all definitions of a schema
                        return "\n".join(rules)
            else:
                rules += _arguments(n, tool, markers.quote)
        if markers.numbered:
            rules.append("NUMBER_OF_CALL: /[0-9]{1,4}/")
        if markers.tags is not None:
            rules += any_text(markers.tags, controls)
        if markers.quote is not None:
            quote = literal(markers.quote, controls)
            rules.append(f"string: {quote} TEXT {quote}\n{_GEMMA_VALUE}")
    return "\n".join(rules)


def _calls(shape: AnswerShape, markers: CallMarkers, controls: dict[str, int]) -> str:
    begin, end = (_written(part, markers, controls) for part in markers.around)
    more = ""
    if shape.parallel and markers.separator is not None:
        more = f"({_written(markers.separator, markers, controls)} call)*"
    return f"{begin} call {more} {end}"


def _written(text: str, markers: CallMarkers, controls: dict[str, int]) -> str:
    return literal(text, controls, loose=markers.tags is not None)


def _reasoning(markers: ReasoningMarkers, controls: dict[str, int]) -> Iterator[str]:
    """Rules for reasoning: free text up to its end.  Markers that are dropped may stand between it and the answer."""
    yield f"begins: {literal(markers.begin[0], controls)}"
    end = markers.end[0]
    if has_control(end):
        yield f"thought: free {literal(end, controls)} SPACES?\nfree: /(.|\\n)*/"
    else:
        yield f"thought: free SPACES?\nfree[suffix={json.dumps(end, ensure_ascii=False)}]: /(.|\\n)*/"
    yield "SPACES: /[ \\n]{1,4}/"
    if markers.dropped:
        yield f"dropped: {' | '.join(literal(marker, controls) for marker in markers.dropped)}"


def _arguments(n: int, tool: Tool, quote: str | None) -> Iterator[str]:
    if quote is None:
        yield f"arguments_{n}: {json_expression(arguments_schema(tool))}"
        return
    names = tool.parameters.get("properties")
    if not isinstance(names, dict) or not names:
        yield f"arguments_{n}: object"
        return
    keys = " | ".join(json.dumps(name, ensure_ascii=False) for name in names)
    yield f'arguments_{n}: "{{" (pair_{n} ("," pair_{n})*)? "}}"\npair_{n}: ({keys}) ":" value'


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Schema of a tool's arguments.  Arguments that it does not name are allowed only if it says so."""
    schema = {**tool.parameters, "type": "object"}
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema
