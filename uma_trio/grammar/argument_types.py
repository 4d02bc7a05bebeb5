"""Arguments that are written as text: the schema of the tool says which of them are strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from uma_trio.errors import BadRequest
from uma_trio.protocol.chat import MAX_TOOL_DEPTH, check_json

STRING: Final = frozenset({"string"})
ANY_TYPE: Final = STRING | {"number", "integer", "boolean", "null", "object", "array"}
"""The types of JSON schema."""

MAX_SCHEMAS: Final = 4096
"""Parts of a tool's schema that are looked at.  Further ones allow anything."""
_MAX_CHOICES: Final = 1024
"""Values of an ``enum`` that are looked at."""
_MAX_REFERENCE: Final = 1024
"""Characters of a ``$ref``."""

_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
"""Some templates show such values as Python does, so models write them like this as well."""


def property_schema(parameters: Mapping[str, Any], key: str) -> Any:
    """Schema of one argument; ``True``, which allows anything, if ``parameters`` do not have it."""
    properties = parameters.get("properties")
    return properties.get(key, True) if isinstance(properties, dict) else True


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """``schema``, or what its ``$ref`` points to in ``root``; ``True`` if it points nowhere."""
    for _ in range(MAX_TOOL_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = _target(schema["$ref"], root)
    return True


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#") or len(reference) > _MAX_REFERENCE:
        return True
    node: Any = root
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            return True
        node = node[key]
    return node


class SchemaTypes:
    """Types that the parts of a tool's schema allow.

    Looks at each part once, whatever refers to what.

    Args:
        root: the schema of all arguments.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._seen: dict[int, frozenset[str]] = {}

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Types that ``schema``, a part of the root, allows; all where that is not plain."""
        schema = resolved(schema, self._root)
        if not isinstance(schema, dict) or depth > MAX_TOOL_DEPTH:
            return ANY_TYPE
        if id(schema) not in self._seen:
            if len(self._seen) == MAX_SCHEMAS:
                return ANY_TYPE
            self._seen[id(schema)] = ANY_TYPE  # where a schema contains itself
            self._seen[id(schema)] = self._of_new(schema, depth + 1)
        return self._seen[id(schema)]

    def _of_new(self, schema: dict[str, Any], depth: int) -> frozenset[str]:
        types = ANY_TYPE
        if "const" in schema:
            types &= {_type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            types &= {_type_of(value) for value in schema["enum"][:_MAX_CHOICES]}
        named = schema.get("type", [])
        names = named if isinstance(named, list) else [named]
        if names:
            types &= {name for name in names if isinstance(name, str)} | ({"integer"} if "number" in names else set())
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                types &= _union(self.of(part, depth) for part in schema[key])
        if isinstance(schema.get("allOf"), list):
            for part in schema["allOf"]:
                types &= self.of(part, depth)
        return types or ANY_TYPE


def _union(parts: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*parts)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}
    return names.get(type(value), "array")


def read_value(text: str, types: frozenset[str]) -> Any:
    """The value for which ``text`` stands.

    A string is written as it is, anything else as JSON.  Text that is not valid JSON, or that could not be sent to a
    client, is a string after all.

    Args:
        types: those that the schema allows.
    """
    if types == STRING:
        return text
    value = read_json(text)
    is_other = not isinstance(value, str) and ("string" not in types or _type_of(value) in types)
    return value if is_other else text


def read_json(text: str) -> Any:
    """The value of ``text`` as JSON; ``text`` itself if it is not valid JSON."""
    bare = text.strip()
    try:
        value = msgspec.json.decode(_PYTHON.get(bare, bare))
        check_json([value], "a value", MAX_TOOL_DEPTH)
        msgspec.json.encode(value)
    except (BadRequest, msgspec.MsgspecError, OverflowError, RecursionError, UnicodeError):
        return text
    return value
