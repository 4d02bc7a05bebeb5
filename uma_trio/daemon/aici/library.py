"""Answers what clients ask about controllers: to upload, tag, list and delete them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from uma_trio.aici_link.messages import Auth, Removal, RemoveModule, RemoveTags
from uma_trio.daemon.aici.exchange import ControllerRuntime
from uma_trio.protocol.controllers import ControllerModule, Controllers, ControllersQuery, ControllerTag

T = TypeVar("T")

PER_EVENT: Final = 128
"""Tags or modules."""


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
    match query.action:
        case "delete":
            removal: Removal = RemoveTags(query.tags or [], query.owner)
            if query.module_id is not None:
                removal = RemoveModule(query.module_id, query.owner)
            return [Controllers(id=query.id, deleted=await runtime.remove(removal, auth))]
        case "modules":
            modules = await runtime.get_modules(query.owner, auth)
            records = [ControllerModule(**msgspec.structs.asdict(module)) for module in modules]
            return _events(records, lambda part, more: Controllers(id=query.id, modules=[*part], more=more))
    if query.module_id is not None:
        tags = await runtime.set_tags(query.module_id, query.tags or [], auth)
    else:
        tags = await runtime.get_tags(auth)
    infos = [ControllerTag(**msgspec.structs.asdict(tag)) for tag in tags]
    return _events(infos, lambda part, more: Controllers(id=query.id, tags=[*part], more=more))


def _events(records: Sequence[T], make: Callable[[Sequence[T], bool], Controllers]) -> Iterator[Controllers]:
    """Yield events with some of ``records`` each; at least one event."""
    for at in range(0, max(1, len(records)), PER_EVENT):
        yield make(records[at : at + PER_EVENT], at + PER_EVENT < len(records))
