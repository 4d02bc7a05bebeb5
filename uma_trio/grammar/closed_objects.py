"""Closes objects of a JSON schema: they get the properties that the schema names, and no others.  Pure.

A schema that says nothing about further properties allows any.  A model that follows it at random invents keys until its
answer is cut.  An answer without further properties is valid by the schema, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

ABOUT_OTHERS: Final = ("additionalProperties", "unevaluatedProperties", "patternProperties")
"""Keywords with which a schema says itself which further properties there may be."""
ABOUT_KEYS: Final = ("properties", "required", "minProperties", "propertyNames", *ABOUT_OTHERS)
CONDITIONS: Final = ("if", "not", "dependentSchemas")
ALTERNATIVES: Final = ("anyOf", "oneOf")
"""Lists of schemas, one of which describes the same object."""
SAME_OBJECT: Final = (*ALTERNATIVES, "allOf", "then", "else", "dependentSchemas")
INSIDE: Final = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
    "$defs",
    "definitions",
)
"""Keywords with schemas of other values."""


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with ``additionalProperties: false`` where it names properties and says nothing about others.

    An object stays as it is if several parts of the schema describe it together, such as those of ``allOf``: what one
    part does not name, another one may.

    Raises:
        RecursionError: it is nested too deep.
    """
    closed: dict[str, Any] = _closed(schema, _described_together(schema))
    return closed


def _closed(node: Any, together: frozenset[int]) -> Any:
    if not isinstance(node, dict):
        return node
    closed = dict(node)
    for key in (*INSIDE, *SAME_OBJECT):
        child = node.get(key)
        if isinstance(child, list):
            closed[key] = [_closed(part, together) for part in child]
        elif isinstance(child, dict) and _is_schema(key):
            closed[key] = _closed(child, together)
        elif isinstance(child, dict):
            closed[key] = {name: _closed(part, together) for name, part in child.items()}
    if id(node) not in together and _names_all(node):
        closed["additionalProperties"] = False
    return closed


def _names_all(node: Mapping[str, Any]) -> bool:
    """Whether a schema names the properties of an object, all that it needs among them, and says nothing of others."""
    names, needed, n_needed = node.get("properties"), node.get("required", []), node.get("minProperties", 0)
    return (
        isinstance(names, dict)
        and bool(names)
        and not any(key in node for key in ABOUT_OTHERS)
        and isinstance(needed, list)
        and all(isinstance(name, str) and name in names for name in needed)
        and isinstance(n_needed, int)
        and n_needed <= len(names)
    )


def _described_together(root: dict[str, Any]) -> frozenset[int]:
    """Ids of the schemas that describe an object together with others."""
    together: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    left: list[tuple[Any, bool]] = [(root, False)]
    while left:
        node, shares = left.pop()
        if not isinstance(node, dict) or (id(node), shares) in seen:
            continue
        seen.add((id(node), shares))
        shares = shares or _n_parts(node) > 1
        if shares:
            together.add(id(node))
        for key in SAME_OBJECT:
            left += [(child, shares) for child in _schemas(key, node.get(key))]
        left.append((_target(root, node.get("$ref")), shares))
        for key in INSIDE:
            left += [(child, False) for child in _schemas(key, node.get(key))]
    return frozenset(together)


def _n_parts(node: Mapping[str, Any]) -> int:
    """How many parts of a schema describe the keys of the same object."""
    both = node.get("allOf")
    n = any(key in node for key in ABOUT_KEYS) + (len(both) if isinstance(both, list) else 0)
    n += sum(key in node for key in (*ALTERNATIVES, "$ref"))
    return n + 2 * any(key in node for key in CONDITIONS)


def _is_schema(key: str) -> bool:
    return key in ("additionalProperties", "items", "then", "else")


def _schemas(key: str, value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from value
    elif isinstance(value, dict) and _is_schema(key):
        yield value
    elif isinstance(value, dict):
        yield from value.values()


def _target(root: Any, reference: Any) -> Any:
    """The schema that ``$ref`` means; ``None`` if it is not in this document."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = root
    for part in filter(None, reference[1:].split("/")):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node
