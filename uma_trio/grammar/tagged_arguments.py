"""Rules for arguments that a model writes one by one, between tags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from uma_trio.grammar.argument_types import ANY_TYPE, STRING, SchemaTypes, resolved
from uma_trio.grammar.terms import json_expression, literal, quoted, up_to_control
from uma_trio.models.markers import ParameterTags
from uma_trio.protocol.chat import Tool

MAX_COUNTED: Final = 1024
"""The largest ``maxLength`` that is kept: counting costs memory for each character."""


def argument_rules(name: str, tool: Tool, tags: ParameterTags, controls: Mapping[str, int]) -> Iterator[str]:
    """The rule ``name``, and the rules that it needs; those of ``any_text`` are needed too.

    Arguments come in the order of the schema.  Strings follow ``enum``, ``const`` and ``maxLength``; other values follow
    their schema.

    Raises:
        ValueError: a schema is not JSON.
    """
    schemas, required = tool.parameters.get("properties"), tool.parameters.get("required")
    before_key = literal(tags.before_key, controls, loose=True)
    if not isinstance(schemas, dict):
        yield f"{name}: ({before_key} ANY_KEY {name}_any)*"
        yield from _value(f"{name}_any", True, ANY_TYPE, tool.parameters, tags, controls)
        return
    needed = required if isinstance(required, list) else []
    parts = (f"{name}_{n}{'' if key in needed else '?'}" for n, key in enumerate(schemas))
    yield f"{name}: {' '.join(parts)}"
    types = SchemaTypes(tool.parameters)
    for n, (key, schema) in enumerate(schemas.items()):
        yield f"{name}_{n}: {before_key} {quoted(key)} {name}_{n}_value"
        yield from _value(f"{name}_{n}_value", schema, types.of(schema), tool.parameters, tags, controls)


def any_text(tags: ParameterTags, controls: Mapping[str, int]) -> Iterator[str]:
    """Rules for keys without a schema, and for text up to the end of its value."""
    yield "ANY_KEY: /[A-Za-z0-9_]{1,64}/"
    yield from _text("any_text", "*", tags, controls)


def _value(
    name: str,
    schema: Any,
    types: frozenset[str],
    root: Mapping[str, Any],
    tags: ParameterTags,
    controls: Mapping[str, int],
) -> Iterator[str]:
    padding = literal(tags.padding, controls)
    end = f"{padding} {literal(tags.after_value, controls)}"
    before = f"{literal(tags.before_value, controls, loose=True)} {padding}"
    before_json = before
    if tags.before_json is not None:
        before_json = f"{literal(tags.before_json, controls, loose=True)} {padding}"
    schema = resolved(schema, root)
    ways = []
    if types != STRING and ("string" not in types or tags.before_json is not None):
        ways.append(f"{before_json} {_json(schema if isinstance(schema, dict) else {}, root)} {end}")
    if "string" in types:
        longest = _max_length(schema)
        if choices := _choices(schema):
            ways.append(f"{before} ({' | '.join(map(quoted, choices))}) {end}")
        elif longest is None:
            ways.append(f"{before} any_text")
        else:
            ways.append(f"{before} {name}_text")
            yield from _text(f"{name}_text", f"{{0,{longest}}}", tags, controls)
    yield f"{name}: {' | '.join(ways)}"


def _json(schema: dict[str, Any], root: Mapping[str, Any]) -> str:
    """JSON of ``schema``, with the definitions to which it refers."""
    alone = json_expression(schema)
    if '"$ref"' not in alone:
        return alone
    return json_expression({**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema})


def _max_length(schema: Any) -> int | None:
    longest = schema.get("maxLength") if isinstance(schema, dict) and schema.get("type") == "string" else None
    return longest if isinstance(longest, int) and 0 < longest <= MAX_COUNTED else None


def _choices(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    is_text = isinstance(values, list) and all(isinstance(value, str) and value for value in values)
    return values if isinstance(values, list) and is_text else []


def _text(name: str, times: str, tags: ParameterTags, controls: Mapping[str, int]) -> Iterator[str]:
    """A rule for text and the end of its value, which is the first one."""
    suffix, rest = up_to_control(tags.padding + tags.after_value)
    after = literal(rest, controls)
    if not suffix:
        yield f"{name}: {name}_free {after}\n{name}_free: /(.|\\n){times}/"
    else:
        # In front of a control token, ``suffix`` may also be text of the value.  Then its parts cannot be counted.
        several = "+" if rest and times == "*" else ""
        yield f"{name}: {name}_free{several} {after}\n{name}_free[suffix={quoted(suffix)}]: /(.|\\n){times}/"
