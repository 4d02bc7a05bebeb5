"""Makes JSON schemas, regular expressions, choices and GBNF grammars from a seed, each with the check of an answer.

Strings and arrays are bounded, so that a model without taste for JSON completes most answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any, Final

import attrs
import jsonschema

KEYS: Final = ("name", "age", "tags", "id", "größe", "名前", "a b", 'quo"te', "back\\slash", "émoji 🦊", "x-y", "$", "")
PATTERNS: Final = (
    *(r"^[a-z]{1,6}$", r"^\d{3}-\d{4}$", r"^(red|green|blue)$", r"^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5})?$"),
    *(r"^[^a-z]{1,4}$", r"^(ab?c){1,3}$", r"^[äöüß]{1,3}$", r"^#[0-9a-fA-F]{6}$", r"^\w{2}\s\w{2}$"),
)
FORMATS: Final = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration")
WORDS: Final = (
    "yes",
    "no",
    "maybe",
    "Lima",
    "grüße",
    "日本",
    "🚀",
    "a/b",
    'say "hi"',
    "tab\there",
    "line\nbreak",
    "C:\\x",
)


@attrs.frozen
class Case:
    """A constraint, and what an answer that follows it must be."""

    name: str
    constraint: dict[str, Any]
    check: Callable[[str], str | None]
    """What is wrong with a complete answer; ``None``: nothing."""


def make_case(seed: int) -> Case:
    """The case of ``seed``: seven of ten are schemas."""
    random = Random(seed)
    kind = random.choices(("schema", "regex", "choice", "gbnf", "object"), (14, 3, 1, 1, 1))[0]
    if kind == "schema":
        schema = make_schema(random)
        return Case(f"{seed} schema", {"json_schema": schema}, lambda text: check_json(text, schema))
    if kind == "regex":
        regex = make_regex(random)
        return Case(f"{seed} regex", {"regex": regex}, lambda text: check_regex(text, regex))
    if kind == "choice":
        choice = random.sample(WORDS, random.randint(1, 6))
        return Case(f"{seed} choice", {"choice": choice}, lambda text: None if text in choice else f"not in {choice}")
    if kind == "gbnf":
        grammar, regex = make_gbnf(random)
        return Case(f"{seed} gbnf", {"gbnf": grammar}, lambda text: check_regex(text, regex))
    return Case(f"{seed} object", {"json_object": True}, lambda text: check_json(text, {"type": "object"}))


def check_json(text: str, schema: dict[str, Any]) -> str | None:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    errors = jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(value)
    return next((error.message[:300] for error in errors), None)


def check_regex(text: str, regex: str) -> str | None:
    return None if re.fullmatch(regex, text) else "no match"


# -- schemas --------------------------------------------------------------------------------------


def make_schema(random: Random) -> dict[str, Any]:
    """A schema, sometimes with definitions that refer to each other or to themselves."""
    if random.random() < 0.15:
        return _recursive(random)
    if random.random() < 0.2:
        shared = _value(random, 1)
        schema = _object(random, 2, lambda depth: {"$ref": "#/$defs/shared"} if random.random() < 0.5 else None)
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"shared": shared}, **schema}
    return _object(random, 3) if random.random() < 0.7 else _value(random, 3)


def _recursive(random: Random) -> dict[str, Any]:
    """A tree whose nodes have few children."""
    node: dict[str, Any] = {
        "type": "object",
        "properties": {
            "value": _scalar(random),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value", "next"] if random.random() < 0.5 else ["value"],
        "additionalProperties": False,
    }
    if random.random() < 0.5:
        node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _value(
    random: Random, depth: int, reference: Callable[[int], dict[str, Any] | None] = lambda depth: None
) -> dict[str, Any]:
    found = reference(depth)
    if found is not None:
        return found
    kind = random.choices(("scalar", "object", "array", "anyOf", "oneOf", "allOf"), (8, 3, 3, 2, 1, 1))[0]
    if depth <= 0 or kind == "scalar":
        return _scalar(random)
    if kind == "object":
        return _object(random, depth - 1, reference)
    if kind == "array":
        return _array(random, depth - 1, reference)
    if kind == "anyOf":
        return {"anyOf": [_value(random, depth - 1, reference) for _ in range(random.randint(1, 3))]}
    if kind == "oneOf":  # supported where each alternative has a type of its own
        return {"oneOf": [_string(random), _integer(random), {"type": "null"}][: random.randint(1, 3)]}
    return {"allOf": [{"type": "string", "minLength": 1}, {"maxLength": random.randint(1, 8)}]}


def _object(
    random: Random, depth: int, reference: Callable[[int], dict[str, Any] | None] = lambda depth: None
) -> dict[str, Any]:
    keys = random.sample(KEYS, random.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: _value(random, depth, reference) for key in keys},
        "required": [key for key in keys if random.random() < 0.6],
        "additionalProperties": False,
    }
    if random.random() < 0.1:
        schema["additionalProperties"] = _scalar(random)
        schema["maxProperties"] = len(keys) + 2
    elif random.random() < 0.2:
        del schema["additionalProperties"]
    elif random.random() < 0.1:
        schema["patternProperties"] = {"^z[0-9]$": _scalar(random)}
    if "maxProperties" in schema and random.random() < 0.8:
        del schema["maxProperties"]
    if random.random() < 0.2:
        schema["title"] = schema["description"] = "annotations change nothing"
    return schema


def _array(random: Random, depth: int, reference: Callable[[int], dict[str, Any] | None]) -> dict[str, Any]:
    least = random.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + random.randint(0, 2)}
    if random.random() < 0.3:
        schema["prefixItems"] = [_value(random, depth - 1, reference) for _ in range(random.randint(1, 2))]
        schema["items"] = False if random.random() < 0.5 else _scalar(random)
        schema["maxItems"] = len(schema["prefixItems"]) + (schema["items"] is not False)
        schema["minItems"] = min(least, schema["maxItems"])
    else:
        schema["items"] = _value(random, depth - 1, reference)
    return schema


def _scalar(random: Random) -> dict[str, Any]:
    kind = random.randrange(9)
    if kind < 3:
        return _string(random)
    if kind < 5:
        return _integer(random)
    if kind == 5:
        return _number(random)
    if kind == 6:
        return {"type": random.choice(("boolean", "null", ["boolean", "null"], ["string", "null"]))} | {"maxLength": 8}
    if kind == 7:
        return {"enum": random.sample((*WORDS, 0, -1, 3.5, True, None, [1, "a"], {"k": "ü"}), random.randint(1, 5))}
    return {"const": random.choice((*WORDS, 7, None, False, [], {}, {"größe": [1, 2]}))}


def _string(random: Random) -> dict[str, Any]:
    kind = random.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": random.choice(PATTERNS)}
    if kind == 1:
        chosen = random.choice(FORMATS)  # llguidance bounds the labels of a host name and not the name
        return {"type": "string", "format": chosen} | ({"maxLength": 60} if chosen == "hostname" else {})
    least = random.choice((0, 0, 1, 3))
    return {"type": "string", "minLength": least, "maxLength": least + random.choice((0, 1, 5, 12))}


def _integer(random: Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    low = random.choice((-(2**31), -100, -7, 0, 1, 95, 10**6))
    if random.random() < 0.8:
        schema[random.choice(("minimum", "exclusiveMinimum"))] = low
        schema[random.choice(("maximum", "exclusiveMaximum"))] = low + random.choice((2, 10, 1000, 2**31))
    else:
        schema |= {"minimum": 0, "maximum": 1000, "multipleOf": random.choice((2, 5, 7))}
    return schema


def _number(random: Random) -> dict[str, Any]:
    low = random.choice((-1000.5, -1.25, 0, 0.1, 99))
    return {"type": "number", "minimum": low, "maximum": low + random.choice((0.5, 1, 33.3, 5000))}


# -- regular expressions, GBNF --------------------------------------------------------------------


def make_regex(random: Random, depth: int = 3) -> str:
    """A bounded regular expression that llguidance and Python's ``re`` read alike."""
    if depth == 0:
        atoms = (
            "a",
            "[a-f]",
            "[0-9]",
            "[^a-z\\n]",
            "é",
            "[あ-ん]",
            "\\.",
            "\\\\",
            "/",
            "🚀",
            '"',
            "\\n",
            "\\[",
            "-",
            " ",
        )
        return random.choice(atoms)
    kind = random.randrange(4)
    parts = [make_regex(random, depth - 1) for _ in range(random.randint(1, 3))]
    if kind == 0:
        return f"({'|'.join(parts)})"
    if kind == 1:
        least = random.randint(0, 2)
        return f"({parts[0]}){{{least},{least + random.randint(0, 3)}}}"
    if kind == 2:
        return f"({parts[0]})?{''.join(parts[1:])}"
    return "".join(parts)


def make_gbnf(random: Random) -> tuple[str, str]:
    """A grammar, and a regular expression of the same texts."""
    words = random.sample(("red", "green", "blue", "grün", "日本"), random.randint(1, 3))
    rules = [" | ".join([json.dumps(word, ensure_ascii=False) for word in words]), "[0-9] [0-9]?", '"x" ("y" | "z")*']
    patterns = [f"({'|'.join(words)})", "[0-9][0-9]?", "x(y|z)*"]
    order = random.choices(range(2), k=random.randint(1, 4)) + ([2] if random.random() < 0.3 else [])
    body = "\n".join([f"r{n} ::= {rule}" for n, rule in enumerate(rules)])
    root = ' "," '.join([f"r{n}" for n in order])
    return f"root ::= {root}\n{body}\n", ",".join([patterns[n] for n in order])
