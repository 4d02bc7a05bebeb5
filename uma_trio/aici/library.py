"""Answers what clients ask about controllers: to upload, tag and list them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from uma_trio.aici.exchange import ControllerRuntime
from uma_trio.aici.messages import Auth, TagInfo
from uma_trio.principal import Principal
from uma_trio.protocol.controllers import Controllers, ControllersQuery, ControllerTag

TAGS_PER_EVENT: Final = 128


def auth_of(principal: Principal, *, is_admin: bool) -> Auth:
    """Who asks, in the runtime's words.  Tags of others than administrators begin with this name and a dot."""
    return Auth(principal.name.removeprefix("tenant:").replace(":", ""), is_admin)


async def answer(
    runtime: ControllerRuntime, query: ControllersQuery, wasm: bytes | bytearray | None, auth: Auth
) -> Iterable[Controllers]:
    """Do what ``query`` asks; returns the events of the answer.

    Args:
        wasm: the whole module of an upload.

    Raises:
        UmaError: it cannot be done.
    """
    if wasm is not None:
        info = await runtime.make_module(wasm, auth)
        return [
            Controllers(
                id=query.id,
                module_id=info.module_id,
                wasm_size=info.wasm_size,
                compiled_size=info.compiled_size,
                time_ms=info.time,
            )
        ]
    if query.module_id is not None:
        return _events(query, await runtime.set_tags(query.module_id, query.tags or [], auth))
    return _events(query, await runtime.get_tags(auth))


def _events(query: ControllersQuery, tags: Sequence[TagInfo]) -> Iterator[Controllers]:
    left = [*tags]
    while True:
        part, left = left[:TAGS_PER_EVENT], left[TAGS_PER_EVENT:]
        yield Controllers(id=query.id, tags=[_tag(info) for info in part], more=bool(left))
        if not left:
            return


def _tag(info: TagInfo) -> ControllerTag:
    return ControllerTag(
        tag=info.tag,
        module_id=info.module_id,
        updated_at=info.updated_at,
        updated_by=info.updated_by,
        wasm_size=info.wasm_size,
        compiled_size=info.compiled_size,
    )
