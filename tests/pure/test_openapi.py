"""The OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from uma_trio.gateway.application import ENDPOINTS
from uma_trio.gateway.openapi import document


def patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for name, each in schema.items():
            if name == "pattern" and isinstance(each, str):
                yield each
            yield from patterns(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from patterns(each)


def test_patterns_are_those_of_json_schema() -> None:
    found = {*patterns(document(ENDPOINTS))}
    assert "^[0-9a-f]{64}$" in found
    assert not [each for each in found if r"\Z" in each or r"\A" in each]
