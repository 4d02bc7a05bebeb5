"""Says what is wrong with a constraint, in words of the client that sent it.

llguidance's errors are about a grammar that the client has not written: they name its lines, its limits and Rust types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from uma_trio.grammar.calls import AnswerShape
from uma_trio.grammar.regex import own_column, own_position, own_regex
from uma_trio.protocol.field_errors import FieldError
from uma_trio.protocol.requests import Constraint, constraint_kind
from uma_trio.protocol.types import MAX_ERROR_CHARS

TOO_COMPLEX: Final = "it is too complex; use fewer alternatives, optional parts and repetitions"
NOTHING_MATCHES: Final = "no text matches it"

_POSITION: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_EXCERPT: Final = re.compile(r"^\s*\d+ \|.*$|^[\s^]*$|<non-verbose/>", re.MULTILINE)
_REGEX_ERROR: Final = re.compile(r"regex parse error:\n    (.*)\n    ( *)\^.*\nerror: (.*)")

_REPLACED: Final[tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]] = (
    (r".*(schema too large|too big|[Tt]oo many items|max is \d+; consider|[Ff]uel exhausted|too many expressions).*", TOO_COMPLEX),
    (r".*(too many states|[Tt]oo complex|too much memory|memory allocation).*", TOO_COMPLEX),
    (r".*NoExtension.*|Grammar is empty.*", NOTHING_MATCHES),
    (r".*recursion limit exceeded.*|.*maximum recursion depth.*", "it is nested too deeply"),
    (r"Unimplemented keys: \[(.*)\]", lambda match: f"not supported: {match[1].replace(chr(34), '')}"),
    (r"oneOf constraints are not.*", "oneOf is supported only if no value can match two alternatives; use anyOf"),
    (r"Resource '(.*)' is not present.*", r"$ref \1 leads out of the schema; only its own parts can be referred to"),
    (r"Pointer '(.*)' does not exist", r"$ref #\1 leads nowhere"),
    (r"circular references with sibling keys.*: .*?(#.*)", r"$ref \1 leads to itself and has other keywords next to it"),
    (r"(GBNF: )?lexer error", "it cannot be read from here on"),
    (r"panic: .*|PanicException: .*", "the library that follows grammars fails on it"),
    (r"Invalid type: (.*)", r"\1 is no type; it may be string, number, integer, boolean, null, array or object"),
    (r"invalid multiple of", "multipleOf must be greater than 0"),
    (r"Failed to generate regex for .* range: min=(.*), max=(.*)", r"no range of numbers from \1 to \2 can be followed"),
    (r"(.*)lookarounds not supported yet; \w+ in regex .*", r"look-around and word boundaries (\\b) are not supported"),
    (r"(following special tokens are available: )(.*)", r"there are \2"),
    *((r"Some\((.*?)\)", r"\1"), (r"\bNone\b", "any"), (r"\bf64\b", "number"), (r"json-schema:///", "")),
)  # fmt: skip
"""Errors of llguidance, and their replacements.  The last row is for types of Rust in other errors."""

_MAPS_OF_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with an object of schemas.  The client chose its keys, so none of them is a keyword."""

_WITHOUT_SCHEMAS: Final = ("const", "enum", "default", "examples", "required")
"""Keywords that hold no schemas."""


def explain(error: str) -> str:
    """``error`` of llguidance about an answer that cannot go on, on one line."""
    return _plain(error)[:MAX_ERROR_CHARS]


def explain_constraint(error: str, constraint: Constraint) -> FieldError:
    """``error`` of llguidance about ``constraint``, on one line."""
    field = f"constraint.{constraint_kind(constraint)}"
    if constraint.regex is not None and "lexer error" in error:
        return FieldError(field, f"{field}: it ends with a backslash that escapes nothing")
    return _field_error(field, _place(error, constraint), error)


def explain_shape(error: str, shape: AnswerShape) -> FieldError:
    """``error`` of llguidance about the grammar of an answer, on one line; names the tool if it can be found."""
    for n, tool in enumerate(shape.tools):
        place = _place(error, Constraint(json_schema=tool.parameters))
        if place and (len(shape.tools) == 1 or "regex" not in place):
            return _field_error(f"tools[{n}].parameters", place, error)
    if shape.text is not None and (not shape.tools or _place(error, shape.text)):
        return explain_constraint(error, shape.text)
    if len(shape.tools) == 1:
        return _field_error("tools[0].parameters", "", error)
    return FieldError("tools", f"parameters of the tools: {_plain(error)}"[:MAX_ERROR_CHARS])


def _field_error(field: str, place: str, error: str) -> FieldError:
    return FieldError(field, f"{field}{place}: {_plain(error)}"[:MAX_ERROR_CHARS])


def _plain(error: str) -> str:
    regex_error = _REGEX_ERROR.search(error)
    if regex_error is not None:
        return regex_error[3]
    text = " ".join(_EXCERPT.sub("", error).split())
    text = _POSITION.sub("", text, count=1).removeprefix("failed to compile JSON schema: ")
    text = re.sub(r'^invalid regex ".*" \(in regex\): ', "", text)
    for pattern, instead in _REPLACED:
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    return text


def _place(error: str, constraint: Constraint) -> str:
    """Where the error is in what the client sent, as text after the name of the field."""
    in_regex = _REGEX_ERROR.search(error)
    if constraint.regex is not None:
        if in_regex is not None:
            return f", character {own_position(constraint.regex, len(in_regex[2])) + 1}"
        return ""
    if in_regex is not None:
        regex, at = in_regex[1], len(in_regex[2])
        if constraint.lark is not None:
            regex = own_regex(constraint.lark, regex)
            at = own_position(regex, at)
        text = regex if len(regex) < 80 else f"{regex[:80]}…"
        return f", regex {text}, character {at + 1}"
    if constraint.json_schema is not None:
        keywords = (
            re.findall(r'"(.*?)"', unimplemented[1])
            if (unimplemented := re.search(r"Unimplemented keys: \[(.*)\]", error))
            else []
        )
        if keywords:
            return next((f", {place}" for place in _paths_of(constraint.json_schema, keywords[0]) if place), "")
    if constraint.lark is not None and (position := _POSITION.match(error)) is not None:
        line, column = int(position[1]), int(position[2])
        lines = constraint.lark.split("\n")
        return f", line {line}, column {own_column(lines[line - 1], column) if 0 < line <= len(lines) else column}"
    return ""


def _paths_of(schema: Any, keyword: str, path: str = "") -> Iterator[str]:
    """The path to each schema in ``schema`` that has ``keyword``, such as ``properties.name``."""
    if isinstance(schema, list):
        for n, part in enumerate(schema):
            yield from _paths_of(part, keyword, f"{path}[{n}]")
    elif isinstance(schema, dict):
        if keyword in schema:
            yield path
        for key, part in schema.items():
            if key in _MAPS_OF_SCHEMAS and isinstance(part, dict):
                for name, inner in part.items():
                    yield from _paths_of(inner, keyword, f"{path}.{key}.{name}".lstrip("."))
            elif key not in _WITHOUT_SCHEMAS:
                yield from _paths_of(part, keyword, f"{path}.{key}".lstrip("."))
