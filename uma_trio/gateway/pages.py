"""The pages: the dashboard at ``/`` and the chat at ``/chat``, with the files that they load; and the dashboard's data."""

from __future__ import annotations

import hashlib
import html
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Final

from msgspec import Meta
from starlette.responses import Response

from uma_trio.client import Activity, Event
from uma_trio.gateway.answer import EVENT_STREAM, Renderer, sse
from uma_trio.gateway.daemon_client import Daemon
from uma_trio.gateway.dialects.common.fields import ModelQuery
from uma_trio.gateway.dialects.native.dialect import NATIVE
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import HttpError
from uma_trio.protocol.messages import to_fields
from uma_trio.protocol.parameters import ROWS, Field

FOLDER: Final = resources.files("uma_trio.gateway") / "dashboard"
CHAT: Final = resources.files("uma_trio.gateway") / "chat"

MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

PLACE: Final = b"<!-- a field for each number -->"

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")),
        *(f"{name} 'none'" for name in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
        "trusted-types pdf",
    )
)
"""Nothing comes from elsewhere, nothing that is written in the page runs, and text cannot become markup.  The one policy
names the worker that reads PDF files."""

HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def _serving(content: bytes, media_type: str) -> Callable[[Call], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def page(call: Call) -> Response:
        """A file of a page."""
        headers = {**HEADERS, "ETag": tag}
        if call.request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return page


def _content(file: Traversable) -> bytes:
    """The content of a file.  In the chat page, each number that the command line has too gets a field."""
    content = file.read_bytes()
    numbers = "".join(_field(row) for row in ROWS if row.flags and row.kinds[0] in (int, float))
    return content.replace(PLACE, numbers.encode()) if file.name == "index.html" else content


def _field(row: Field) -> str:
    step = row.bounds.get("multiple_of", 1) if row.type is int else "any"
    bounds = f'min="{row.bounds.get("ge", 0):g}" max="{row.bounds["le"]}" step="{step}"'
    field = f'<input id="option-{row.name}" name="{row.name}" type="number" {bounds} placeholder="default">'
    return f'<label title="{html.escape(row.plain_help)}">{row.name} {field}</label>'


def _endpoint(name: str, path: str, content: bytes) -> Endpoint:
    return NATIVE.get(path, _serving(content, MEDIA_TYPES[name.rpartition(".")[2]]), needs_key=False)


def _files(page: str, folder: Traversable, at: str) -> Iterator[Endpoint]:
    """The files of a folder that browsers load, ``index.html`` at ``page`` and the others below ``at``."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(page, entry, f"{at}/{entry.name}")
        elif entry.name.rpartition(".")[2] in MEDIA_TYPES:
            path = page if entry.name == "index.html" else f"{at}/{entry.name}"
            yield _endpoint(entry.name, path, _content(entry))


PAGES: Final = (*_files("/", FOLDER, "/dashboard"), *_files("/chat", CHAT, "/chat"))
"""Not in the OpenAPI document, which is for programs.  ``HEAD /`` is how clients of Ollama look for a server."""


class WatchParameters(ModelQuery, kw_only=True):
    """What is watched, and how often."""

    interval_ms: Annotated[int, Meta(ge=50, le=60_000, description="Time between two events.")] = 250


async def watch(call: Call) -> Response:
    """What the daemon does, again and again: metrics, ticks, requests, KV cache, sessions.

    Events are named ``watch``.  Their fields are those of docs/PROTOCOL-REFERENCE.md.
    """
    query = call.query(WatchParameters)
    model = None if query.model is None else (await call.daemon.model(query.model)).name
    return call.stream_events(_events(call.daemon, query.interval_ms, model), _Events())


async def _events(daemon: Daemon, interval_ms: int, model: str | None) -> AsyncIterator[list[Event]]:
    named = {} if model is None else {"model": model}
    async with daemon.connect() as client:
        async for event in client.watch(interval_ms=interval_ms, **named):
            yield [event]


class _Events(Renderer[Event]):
    """Writes the events of a watch."""

    def render(self, event: Event) -> bytes:
        """One event."""
        assert isinstance(event, Activity)
        fields = to_fields(event)
        del fields["event"]
        return sse(fields, event="watch")

    def fail(self, error: HttpError) -> bytes:
        """The daemon is gone."""
        return sse({"code": error.code, "message": error.message}, event="error")


WATCH: Final = NATIVE.get("/v1/watch", watch, media_types=(EVENT_STREAM,), query=WatchParameters, needs_admin=True)
"""The data of the dashboard."""
