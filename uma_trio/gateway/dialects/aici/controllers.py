"""Controllers over HTTP: ``/v1/controllers``, ``/v1/controllers/tags``."""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta
from starlette.responses import Response

from uma_trio.client import Controllers, ControllerTag
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.aici.dialect import AICI
from uma_trio.gateway.dialects.common.shapes import Object, Shape, Warned
from uma_trio.gateway.endpoint import UNKNOWN_PRINCIPAL, Call
from uma_trio.gateway.errors import invalid
from uma_trio.gateway.guard import is_admin
from uma_trio.protocol.controllers import MAX_TAGS, ModuleId


class OwnerQuery(msgspec.Struct):
    """Whose controllers are meant."""

    owner: Annotated[str | None, Meta(description="A tenant, if an administrator asks.")] = None


class Uploaded(Shape):
    """A controller that was stored."""

    module_id: str | None
    wasm_size: int | None
    compiled_size: int | None
    time: int


class TagList(Warned):
    """Names of controllers."""

    tags: list[Object]


class ControllerList(Shape):
    """Controllers that are stored."""

    controllers: list[Object]


class Deleted(Shape):
    """Controllers and names that are gone."""

    deleted: list[str]


async def upload(call: Call) -> Response:
    """Store a controller, a Wasm module, whose bytes are the body of the request."""
    wasm = await call.request.body()
    if not wasm:
        raise invalid("the body must be a Wasm module")
    stored: Controllers = await call.ask(
        lambda client: client.upload_controller(wasm, **_on_behalf(call)),
        counts=True,
    )
    return json_response(
        Uploaded(
            module_id=stored.module_id,
            wasm_size=stored.wasm_size,
            compiled_size=stored.compiled_size,
            time=round(stored.time_ms or 0),
        )
    )


async def list_tags(call: Call) -> Response:
    """The tags that the client can run, the most recently changed first."""
    tags = await call.ask(lambda client: client.controller_tags(**_on_behalf(call)), counts=True)
    return json_response(TagList(tags=[*map(_tag, tags)]))


class TagRequest(msgspec.Struct):
    """Names for a controller."""

    module_id: ModuleId
    tags: Annotated[list[str], Meta(min_length=1, max_length=MAX_TAGS)]


async def set_tags(call: Call) -> Response:
    """Give a controller names: for the client, and if it is an administrator, for everybody."""
    request, warnings = await call.read(TagRequest)
    tags = await call.ask(
        lambda client: client.tag_controller(request.module_id, request.tags, **_on_behalf(call)),
        counts=True,
    )
    return json_response(TagList(tags=[*map(_tag, tags)]), warnings=warnings)


async def list_modules(call: Call) -> Response:
    """The client's controllers, also those without a tag; for an administrator all, or those of one owner."""
    owner = call.query(OwnerQuery).owner
    modules = await call.ask(lambda client: client.controller_modules(owner=owner, **_on_behalf(call)), counts=True)
    return json_response(
        ControllerList(controllers=[{**attrs.asdict(module), "used_at": round(module.used_at)} for module in modules])
    )


async def delete_module(call: Call) -> Response:
    """Delete a controller and its tags."""
    module_id = call.request.path_params["module_id"]
    return await _delete(call, module_id=module_id)


async def delete_tag(call: Call) -> Response:
    """Delete a name of a controller."""
    return await _delete(call, tags=[call.request.path_params["tag"]])


async def _delete(call: Call, **names: Any) -> Response:
    names |= {"owner": call.query(OwnerQuery).owner, **_on_behalf(call)}
    deleted = await call.ask(lambda client: client.delete_controller(**names), counts=True)
    return json_response(Deleted(deleted=deleted))


def _on_behalf(call: Call) -> dict[str, Any]:
    """The fields of a query that say who asks."""
    if (principal := call.daemon.principal) is not None:
        return {"principal": principal, "principal_is_admin": is_admin(call.request.scope)}
    return {"principal": UNKNOWN_PRINCIPAL} if call.is_unknown else {}


def _tag(tag: ControllerTag) -> dict[str, Any]:
    return {**attrs.asdict(tag), "updated_at": round(tag.updated_at)}


ENDPOINTS = (
    AICI.post("/v1/controllers", upload, None, Uploaded, raw_body="application/wasm"),
    AICI.get("/v1/controllers", list_modules, ControllerList, query=OwnerQuery),
    AICI.get("/v1/controllers/tags", list_tags, TagList),
    AICI.post("/v1/controllers/tags", set_tags, TagRequest, TagList),
    AICI.delete("/v1/controllers/{module_id}", delete_module, Deleted, query=OwnerQuery),
    AICI.delete("/v1/controllers/tags/{tag}", delete_tag, Deleted, query=OwnerQuery),
)
