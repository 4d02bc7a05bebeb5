"""The page at ``/docs``: the OpenAPI document for people, rendered by the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Final

import anyio
from starlette.responses import Response

from uma_trio.gateway.dialects.native.dialect import NATIVE
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.openapi import document
from uma_trio.gateway.pages import HEADERS, MEDIA_TYPES

FOLDER: Final = resources.files("uma_trio.gateway") / "reference"


def endpoints_of(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """The endpoints that serve the page about ``endpoints``, and its style.  Neither needs a key: they hold no secrets."""
    described = tuple(endpoints)
    style = (FOLDER / "style.css").read_bytes()
    rendered: list[bytes] = []

    async def page(call: Call) -> Response:
        """The API, for people."""
        if not rendered:
            rendered.append(await anyio.to_thread.run_sync(_render, described))
        return Response(rendered[0], headers=HEADERS, media_type=MEDIA_TYPES["html"])

    async def stylesheet(call: Call) -> Response:
        """How the page looks."""
        return Response(style, headers=HEADERS, media_type=MEDIA_TYPES["css"])

    return tuple(
        NATIVE.get(path, answer, needs_key=False) for path, answer in (("/docs", page), ("/docs/style.css", stylesheet))
    )


def _render(endpoints: Iterable[Endpoint]) -> bytes:
    from jinja2 import Environment, StrictUndefined  # 30 ms of a start, for a page that few open

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "page.jinja").read_text())
    return template.render(groups=groups_of(document(endpoints))).encode()


def groups_of(api: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The operations of an OpenAPI document by the title of their dialect, with the fields of what goes in and comes out."""
    schemas = api["components"]["schemas"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]["200"]["content"]
            shown = {
                "id": operation["operationId"],
                "method": method.upper(),
                "path": path,
                "summary": operation["summary"],
                "description": operation["description"],
                "parameters": [
                    {
                        "name": parameter["name"],
                        "type": type_of(parameter["schema"]),
                        "is_required": parameter["required"],
                        "description": parameter.get("description", ""),
                    }
                    for parameter in operation.get("parameters", ())
                ],
                "takes": _fields(_json_of(operation.get("requestBody", {})), schemas),
                "gives": _fields(answers.get("application/json", {}).get("schema", {}), schemas),
                "media_types": list(answers),
                "errors": [
                    f"{status} {answer['description']}"
                    for status, answer in operation["responses"].items()
                    if status != "200"
                ],
            }
            [tag] = operation["tags"]
            groups.setdefault(tag, []).append(shown)
    return groups


def _json_of(body: Mapping[str, Any]) -> dict[str, Any]:
    return body.get("content", {}).get("application/json", {}).get("schema", {})  # type: ignore[no-any-return]


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields of an object, in the order of their names, those that are required first."""
    schema = _resolve(schema, schemas)
    required = schema.get("required", [])
    names = sorted(schema.get("properties", {}), key=lambda name: (name not in required, name))
    return [
        {
            "name": name,
            "type": type_of(schema["properties"][name]),
            "is_required": name in required,
            "description": schema["properties"][name].get("description", ""),
        }
        for name in names
    ]


def _resolve(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that is meant; of several that are possible, the first object."""
    if "$ref" in schema:
        return schemas[schema["$ref"].rpartition("/")[2]]  # type: ignore[no-any-return]
    for alternative in schema.get("anyOf", ()):
        resolved = _resolve(alternative, schemas)
        if "properties" in resolved:
            return resolved
    return schema


def type_of(schema: Mapping[str, Any]) -> str:
    """A schema in words: ``integer``, ``array of string``, the name of another schema, alternatives with ``or``."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2].rpartition(".")[2]
    if "anyOf" in schema:
        return " or ".join(
            dict.fromkeys(type_of(alternative) for alternative in schema["anyOf"] if alternative.get("type") != "null")
        )
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array" and schema.get("items"):
        return f"array of {type_of(schema['items'])}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
