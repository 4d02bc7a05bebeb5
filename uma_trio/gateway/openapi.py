"""The OpenAPI document, made from the table of endpoints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

import uma_trio
from uma_trio.errors import InternalError
from uma_trio.gateway.answer import JSON, POSITION, json_response
from uma_trio.gateway.dialects.native.dialect import NATIVE
from uma_trio.gateway.endpoint import Call, Endpoint, dialects_of
from uma_trio.gateway.errors import ETA, STATUSES, HttpError
from uma_trio.gateway.upload import MEDIA_TYPE as FORM

REFERENCE: Final = "#/components/schemas/{name}"

ANY_TEXT: Final = {"type": "string"}

HEADERS: Final = {
    "x-request-id": ("The id of the request.", ANY_TEXT),
    POSITION: ("Its place in the queue, 0 if it runs: of a streamed answer to one prompt.", {"type": "integer"}),
    ETA: ("Milliseconds until its end, as predicted: of a streamed answer to one prompt.", {"type": "integer"}),
}
"""Headers of responses: what each is, and its schema."""
ID: Final = ("x-request-id",)
"""Those of each response."""


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The document of these endpoints, in version 3.1 of the format."""
    endpoints = list(endpoints)
    types = {
        shape
        for endpoint in endpoints
        for shape in (endpoint.body, endpoint.form, *endpoint.shapes, endpoint.event_shape)
    } - {None}
    ordered = sorted(types, key=str)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=REFERENCE)
    schema_of = dict(zip(ordered, schemas, strict=True))
    for endpoint in endpoints:
        if endpoint.body is not None:
            name = schema_of[endpoint.body]["$ref"].rpartition("/")[2]
            _hide(components[name], endpoint.hidden_fields)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = paths.setdefault(template_of(endpoint.path), {})
        path[endpoint.method.lower()] = _operation(endpoint, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "uma-trio",
            "version": uma_trio.__version__,
            "description": "The page at /docs shows the same for people.",
        },
        "tags": [{"name": dialect.title} for dialect in dialects_of(endpoints)],
        "paths": paths,
        "components": {
            "schemas": _with_patterns_of_ecma(components),
            "headers": {name: {"description": what, "schema": schema} for name, (what, schema) in HEADERS.items()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"apiKey": []}],
    }


def _with_patterns_of_ecma(schema: Any) -> Any:
    r"""The schema, with patterns as JSON schema has them: the end is ``$``, and ``\Z`` of Python is an error there."""
    match schema:
        case dict():
            return {
                name: keyword.replace(r"\Z", "$")
                if name == "pattern" and isinstance(keyword, str)
                else _with_patterns_of_ecma(keyword)
                for name, keyword in schema.items()
            }
        case list():
            return [_with_patterns_of_ecma(item) for item in schema]
    return schema


def template_of(path: str) -> str:
    """A path of Starlette without the types of its parameters."""
    return re.sub(r":\w+}", "}", path)


def _operation(endpoint: Endpoint, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    content = {media_type: _answer(endpoint, media_type, schema_of) for media_type in endpoint.media_types}
    summary, _, description = (inspect.getdoc(endpoint.answer) or "").partition(".")
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.path}").rstrip("_"),
        "tags": [endpoint.dialect.title],
        "summary": summary,
        "description": description.strip(),
        "responses": {
            "200": {
                "description": "The answer",
                "headers": _headers(HEADERS if endpoint.event_shape is not None else ID),
                "content": content,
            }
        },
    }
    names = [part[1:-1] for part in template_of(endpoint.path).split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if parameters := [*parameters, *_query_parameters(endpoint)]:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {JSON: {"schema": schema_of[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    if endpoint.raw_body is not None:
        binary = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": {endpoint.raw_body: binary}}
    if endpoint.form is not None:
        operation["requestBody"] = {"required": True, "content": {FORM: {"schema": schema_of[endpoint.form]}}}
    body = endpoint.dialect.error_body(HttpError(InternalError, ""), "")
    error = {"text/plain" if isinstance(body, str) else JSON: {"schema": _shape(body)}}
    for status in STATUSES:
        operation["responses"][str(status)] = {
            "description": HTTPStatus(status).phrase,
            "headers": _headers(ID),
            "content": error,
        }
    return operation


def _headers(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _query_parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    """The parameters of the query string.  Those of another dialect at the same path only count with its header."""
    for variant in (endpoint, *endpoint.others):
        if variant.query is None:
            continue
        _, components = msgspec.json.schema_components([variant.query], ref_template=REFERENCE)
        for name, schema in components[variant.query.__name__]["properties"].items():
            [kind] = [kind for kind in schema.pop("anyOf", [{}]) if kind != {"type": "null"}]  # it cannot say null
            schema = {key: value for key, value in {**schema, **kind}.items() if (key, value) != ("default", None)}
            description = schema.pop("description", "")
            if variant is not endpoint:
                description = f"Only with the header {variant.dialect.header}; otherwise any text has no effect."
                schema = schema if schema == ANY_TEXT else {"anyOf": [schema, ANY_TEXT]}
            yield {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _answer(endpoint: Endpoint, media_type: str, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The content of an answer.  Version 3.1 cannot describe the events of a stream, so that has a name of its own."""
    if media_type != JSON:
        events = {} if endpoint.event_shape is None else {"x-event-schema": schema_of[endpoint.event_shape]}
        return {"schema": {}, **events}
    shapes = [schema_of[shape] for shape in endpoint.shapes]
    return {"schema": shapes[0] if len(shapes) == 1 else {"anyOf": shapes} if shapes else {}}


def _hide(schema: dict[str, Any], names: Container[str]) -> None:
    """Remove properties."""
    schema["properties"] = {name: described for name, described in schema["properties"].items() if name not in names}
    schema["required"] = [name for name in schema.get("required", ()) if name not in names]


def _shape(value: Any) -> dict[str, Any]:
    """The JSON schema of an example, with all of its fields."""
    match value:
        case dict():
            properties = {name: _shape(field) for name, field in value.items()}
            return {"type": "object", "properties": properties}
        case str():
            return {"type": "string"}
    return {}


def endpoint_of(endpoints: Iterable[Endpoint]) -> Endpoint:
    """The endpoint that serves the document of the others, and of itself."""

    async def openapi(call: Call) -> Response:
        """What this gateway serves."""
        return json_response(document([*endpoints, endpoint]))

    endpoint = NATIVE.get("/openapi.json", openapi)
    return endpoint
