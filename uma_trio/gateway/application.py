"""The ASGI application: all endpoints, and what is around them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from uma_trio.config import Config
from uma_trio.gateway import health, openapi
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.daemon import Daemon
from uma_trio.gateway.dialects import (
    ollama_generate,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_models,
    starling,
)
from uma_trio.gateway.dialects.openai import OPENAI
from uma_trio.gateway.endpoint import Endpoint
from uma_trio.gateway.errors import HttpError

REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
"""An ``X-Request-Id`` that is taken over from the client."""

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *openai_chat.ENDPOINTS,
    *openai_completions.ENDPOINTS,
    *openai_models.ENDPOINTS,
    *ollama_generate.ENDPOINTS,
    *ollama_models.ENDPOINTS,
    *starling.ENDPOINTS,
    *health.ENDPOINTS,
)


def make_app(config: Config) -> ASGIApp:
    """Build the application for the daemon at ``config.listen.socket``."""
    daemon = Daemon(config.listen.socket)
    endpoints = (*ENDPOINTS, openapi.endpoint_of(ENDPOINTS))
    routes = [endpoint.route(config, daemon) for endpoint in endpoints]
    app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _wrong_method, Exception: _bug})
    return RequestIds(app)


class RequestIds:
    """Gives each request an id, the client's if it sends one, and says it in the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _not_found(request: Request, _: Exception) -> Response:
    return _error(request, HttpError(404, "E_GATEWAY_NOT_FOUND", f"there is no {request.url.path} here"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    allowed: Mapping[str, str] = getattr(error, "headers", None) or {}
    message = f"{request.url.path} does not take {request.method}"
    response = _error(request, HttpError(405, "E_GATEWAY_METHOD", message))
    response.headers.update(allowed)
    return response


async def _bug(request: Request, _: Exception) -> Response:
    return _error(request, HttpError(500, "E_RUNTIME_INTERNAL", "internal error; the daemon's log has the details"))


def _error(request: Request, error: HttpError) -> Response:
    return json_response(OPENAI.error_body(error, request.scope["state"]["request_id"]), error.status)
