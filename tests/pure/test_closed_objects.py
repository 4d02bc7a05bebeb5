"""Which objects of a schema get no further properties."""

from __future__ import annotations

from typing import Any

import jsonschema

from tests.support.cases import all_cases
from uma_trio.grammar.closed_objects import close_objects

A: dict[str, Any] = {"properties": {"a": {}}}
B: dict[str, Any] = {"properties": {"b": {}}}
NO = {"additionalProperties": False}
DEFINED = {"$defs": {"a": A}}


@all_cases(
    ("schema", "closed"),
    [
        ({}, {}),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {}}, {"properties": {}}),
        (A, {**A, **NO}),
        ({"items": A}, {"items": {**A, **NO}}),
        ({"prefixItems": [A, B]}, {"prefixItems": [{**A, **NO}, {**B, **NO}]}),
        ({"properties": {"x": A}}, {"properties": {"x": {**A, **NO}}, **NO}),
        ({"anyOf": [A, B]}, {"anyOf": [{**A, **NO}, {**B, **NO}]}),
        ({"allOf": [A], "title": "t"}, {"allOf": [{**A, **NO}], "title": "t"}),
        ({"$ref": "#/$defs/a", **DEFINED}, {"$ref": "#/$defs/a", "$defs": {"a": {**A, **NO}}}),
        ({"const": A, "enum": [A], "default": A}, {"const": A, "enum": [A], "default": A}),
    ],
)
def test_objects_whose_properties_are_named_are_closed(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    assert close_objects(schema) == closed


@all_cases(
    "schema",
    [
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "unevaluatedProperties": True},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "required": ["a", "other"]},
        {**A, "minProperties": 2},
        {"allOf": [A, B]},
        {**A, "anyOf": [B, {"required": ["c"]}]},
        {"allOf": [{"$ref": "#/$defs/a"}, B], **DEFINED},
        {"$ref": "#/$defs/a", "required": ["c"], **DEFINED},
        {"anyOf": [{"$ref": "#/$defs/a"}], **B, **DEFINED},
        {**A, "if": A, "then": B},
        {**A, "not": {**B, "required": ["b"]}},
        {"allOf": [A], "required": ["b"]},
        {"properties": 1, "items": 2, "allOf": 3, "anyOf": {"x": 4}, "$ref": 5},
    ],
)
def test_objects_stay_open_that_say_so_or_that_several_parts_describe(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


def test_a_definition_that_one_place_needs_open_stays_open() -> None:
    schema = {"properties": {"x": {"$ref": "#/$defs/a"}, "y": {"allOf": [{"$ref": "#/$defs/a"}, B]}}, **DEFINED}
    assert close_objects(schema) == {**schema, **NO}


def test_a_schema_may_refer_to_itself() -> None:
    node = {"properties": {"next": {"$ref": "#"}, "also": {"$ref": "#/properties/next"}}}
    assert close_objects(node) == {**node, **NO}


@all_cases("value", [{"a": 1}, {}, {"a": 1, "x": {"b": 1}}, {"a": 1, "z": 1}, {"x": {"b": 1, "c": 2}}])
def test_what_a_closed_schema_allows_the_schema_allows(value: object) -> None:
    schema = {"properties": {"a": {"type": "integer"}, "x": {"anyOf": [B, {"type": "null"}]}}}
    if jsonschema.Draft202012Validator(close_objects(schema)).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
