"""The dashboard: the page at ``/``, and the files that it loads."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Final

from starlette.responses import Response

from uma_trio.gateway.dialects.starling import STARLING
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.protocol.parameters import PARAMETERS, Parameter

FOLDER: Final = resources.files("uma_trio.gateway") / "dashboard"

MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

PLACE: Final = b"<!-- a field for each sampling parameter -->"

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")),
        *(f"{name} 'none'" for name in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
    )
)
"""Nothing comes from elsewhere, nothing that is written in the page runs, and text cannot become markup."""

HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def _serving(content: bytes, media_type: str) -> Callable[[Call], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def page(call: Call) -> Response:
        headers = {**HEADERS, "ETag": tag}
        if call.request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return page


def _content(name: str) -> bytes:
    """A file of the folder.  In the page, each sampling parameter gets a field."""
    content = (FOLDER / name).read_bytes()
    return content.replace(PLACE, "".join(map(_field, PARAMETERS)).encode()) if name == "index.html" else content


def _field(row: Parameter) -> str:
    bounds = f'min="{row.bounds.get("ge", 0):g}" max="{row.bounds["le"]}" step="{1 if row.type is int else "any"}"'
    field = f'<input id="option-{row.name}" name="{row.name}" type="number" {bounds} placeholder="default">'
    return f'<label title="{html.escape(row.help)}">{row.name} {field}</label>'


def _endpoint(name: str, path: str) -> Endpoint:
    return Endpoint(
        method="GET",
        path=path,
        dialect=STARLING,
        answer=_serving(_content(name), MEDIA_TYPES[name.rpartition(".")[2]]),
        summary="A file of the dashboard",
        needs_key=False,
    )


PAGES: Final = tuple(
    _endpoint(name, "/" if name == "index.html" else f"/dashboard/{name}")
    for name in sorted(each.name for each in FOLDER.iterdir())
)
"""Not in the OpenAPI document, which is for programs.  ``HEAD /`` is how clients of Ollama look for a server."""
