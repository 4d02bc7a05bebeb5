"""The ASGI application: all endpoints, and what is around them."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain
from typing import Final

import anyio
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from uma_trio.config import MB, Config, Http
from uma_trio.gateway import health, metrics, openapi, reference_page
from uma_trio.gateway.batches.service import BatchService
from uma_trio.gateway.body import BodyLimits
from uma_trio.gateway.daemon_client import Daemon
from uma_trio.gateway.dialects.aici import endpoints as aici
from uma_trio.gateway.dialects.anthropic import endpoints as anthropic
from uma_trio.gateway.dialects.native import endpoints as native
from uma_trio.gateway.dialects.ollama import endpoints as ollama
from uma_trio.gateway.dialects.openai import endpoints as openai
from uma_trio.gateway.endpoint import Dialect, Endpoint, by_path, dialects_of
from uma_trio.gateway.errors import NO_PATH, WRONG_METHOD, HttpError, internal_error
from uma_trio.gateway.guard import Guard, path_of, with_headers
from uma_trio.gateway.key_file import CurrentTenants
from uma_trio.gateway.limits import Limiter, WrongKeys
from uma_trio.gateway.origins import Origins
from uma_trio.gateway.pages import PAGES, WATCH
from uma_trio.gateway.peers.leaving import Leaving
from uma_trio.gateway.peers.moving import Peers
from uma_trio.gateway.picture_urls import PictureUrls
from uma_trio.gateway.request_logger import HttpMetrics, RequestLogger, Tracer, log
from uma_trio.gateway.request_record import RequestRecord
from uma_trio.gateway.request_state import IS_OVERLOADED, RequestState
from uma_trio.gateway.unattended import Unattended
from uma_trio.gateway.upload import MAX_FORM_BYTES
from uma_trio.gateway.usage import UsageFile, usage_path
from uma_trio.processes.large_work import LargeWork

REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
"""An ``X-Request-Id`` that is taken over from the client."""

NO_KEYS: Final = (
    "every user of this machine can use HTTP, and read and delete your sessions, because there are no API keys; make one "
    "with: uma-trio keys create NAME"
)

ENDPOINTS: Final = by_path(
    (
        *openai.ENDPOINTS,
        *anthropic.ENDPOINTS,
        *ollama.ENDPOINTS,
        *native.ENDPOINTS,
        *aici.ENDPOINTS,
        *health.ENDPOINTS,
        *metrics.ENDPOINTS,
        WATCH,
    )
)

PATTERNS: Final = [
    (compile_path(endpoint.path)[0], endpoint)
    for endpoint in sorted(ENDPOINTS, key=lambda endpoint: endpoint.path.count("{"))
]
"""What the path of each endpoint looks like, those without parameters first."""

DIALECTS: Final = dialects_of(ENDPOINTS)
"""The first one is that of requests that name no other."""


def in_batches() -> list[Endpoint]:
    """The endpoints of the requests that batches may have."""
    return [endpoint for endpoint in ENDPOINTS if endpoint.is_batched]


def make_app(config: Config) -> ASGIApp:
    """Build the application for the daemon at ``config.listen.socket``.

    Raises:
        KeyFileError: the file of tenants cannot be used.
    """
    return build(config)[0]


def build(config: Config) -> tuple[ASGIApp, Callable[[], None], Callable[[], None]]:
    """Build the application, a function that reads the tenants and what they have used again, and one that says that
    the daemon stops: new requests are refused after the notice.

    Raises:
        KeyFileError: the file of tenants cannot be used.
    """
    daemon = Daemon.of(config, peers=Peers.of(config), pictures=PictureUrls.of(config))
    endpoints = (*ENDPOINTS, openapi.endpoint_of(ENDPOINTS), *reference_page.endpoints_of(ENDPOINTS), *PAGES)
    usage = UsageFile(usage_path(config))
    limiter = Limiter(usage, now_ns=time.monotonic_ns, unix_s=time.time, connections=config.limits.max_connections)
    large_work = LargeWork(anyio.Lock(), anyio.sleep)
    routes = [endpoint.route(config, daemon, limiter, large_work) for endpoint in endpoints]
    tenants = CurrentTenants(config.http.keys)
    if tenants.now() is None:
        log.info(NO_KEYS)
    batches = BatchService.of(config, in_batches(), tenants, limiter, large_work)
    leaving = Leaving(daemon.peers, daemon.connect, config.limits.drain_notice_s)
    app = Starlette(
        routes=routes,
        exception_handlers={404: _not_found, 405: _wrong_method, Exception: _bug},
        lifespan=lambda _: _running(batches, leaving, daemon.unattended),
    )
    app.state.http_metrics = http_metrics = HttpMetrics()
    app.state.batches = batches
    app.state.peers = daemon.peers
    guard = Guard(
        app,
        tenants=tenants,
        limiter=limiter,
        wrong_keys=WrongKeys(now_ns=time.monotonic_ns),
        origins=Origins.of(config.http.hosts, config.http.origins),
        open_paths=frozenset(endpoint.path for endpoint in endpoints if not endpoint.needs_key),
        refuse=_refuse,
        bodies=BodyLimits(config.http.max_body_bytes, config.limits.frame_timeout_s, "http_max_body_bytes"),
        other_bodies=_other_bodies(config, endpoints),
        drain_notice_s=config.limits.drain_notice_s,
    )

    def read_again() -> None:
        usage.forget()
        tenants.read_again()

    def drain() -> None:
        guard.drain()
        batches.stop()
        leaving.begin()

    dialects = {(endpoint.method, endpoint.path): endpoint.dialect.name for endpoint in endpoints}
    logs, tracer = config.http.access_log, _tracer(config.http)
    return ResponseHeaders(RequestLogger(guard, http_metrics, dialects, logs=logs, tracer=tracer)), read_again, drain


def _other_bodies(config: Config, endpoints: Sequence[Endpoint]) -> dict[tuple[str, str], BodyLimits]:
    """The limits of bodies that are not JSON, by method and path."""
    timeout_s = config.limits.frame_timeout_s
    binary = BodyLimits(config.limits.max_controller_bytes, timeout_s, "max_controller_bytes", are_json=False)
    max_bytes = config.files.max_file_mb * MB + MAX_FORM_BYTES
    forms = BodyLimits(max_bytes, timeout_s, "max_file_mb", are_json=False, are_streamed=True)
    return {
        (endpoint.method, endpoint.path): binary if endpoint.form is None else forms
        for endpoint in endpoints
        if endpoint.form is not None or endpoint.raw_body is not None
    }


@contextlib.asynccontextmanager
async def _running(batches: BatchService, leaving: Leaving, unattended: Unattended) -> AsyncIterator[None]:
    """What runs as long as the application."""
    async with batches.running(), leaving.running(), unattended.running():
        yield


def _tracer(settings: Http) -> Tracer | None:
    """What sends traces; ``None`` if none are wanted, or the extra is not there."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from uma_trio.gateway.tracing import otlp_tracer
    except ModuleNotFoundError as error:
        log.warning("no traces are sent: pip install 'uma-trio[otel]'", missing=error.name)
        return None
    return otlp_tracer(settings.otlp_endpoint)


FOR_BROWSERS: Final = ((b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin"))
"""Headers of every response.  A page of elsewhere can neither embed what is here nor have it taken for something else.
Requests of pages that ``http_origins`` allows are not concerned: they use CORS."""


class ResponseHeaders:
    """Begins each request: gives it a ``RequestState``, and an id, the client's if it sends one.

    Says the id in the response, next to ``FOR_BROWSERS``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        record = RequestRecord(request_id, scope["method"], scope["headers"])
        is_overloaded = scope.get("state", {}).get(IS_OVERLOADED, False)
        RequestState(record, send, is_overloaded).attach(scope)

        def add(headers: MutableHeaders) -> None:
            headers["x-request-id"] = headers["request-id"] = request_id
            headers.raw.extend(FOR_BROWSERS)

        await self._app(scope, receive, with_headers(send, add))


async def _not_found(request: Request, _: Exception) -> Response:
    path = request.url.path
    known = _dialect_of(request.scope).instead
    instead = next((text for start, text in known.items() if path.startswith(start)), "/openapi.json lists the paths")
    return _error(
        request,
        HttpError(NO_PATH, f"there is no {path} here; {instead}, and /docs explains them"),
    )


async def _wrong_method(request: Request, _: Exception) -> Response:
    allowed = sorted(_methods_at(request.scope))
    message = f"{request.url.path} does not take {request.method}; it takes {' and '.join(allowed)}"
    response = _error(request, HttpError(WRONG_METHOD, message))
    response.headers["allow"] = ", ".join(allowed)
    return response


def _methods_at(scope: Scope) -> set[str]:
    """The methods of a path, which several endpoints may share; without those of a path with parameters that fits, too."""
    routes = [route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE]
    fewest = min([len(route.param_convertors) for route in routes], default=0)
    return {method for route in routes if len(route.param_convertors) == fewest for method in route.methods}


async def _bug(request: Request, _: Exception) -> Response:
    return _error(request, internal_error())


def _error(request: Request, error: HttpError) -> Response:
    return _refuse(error, request.scope)


def _refuse(error: HttpError, scope: Scope) -> Response:
    """The response for an error that no endpoint has raised, in the form of the path's dialect."""
    record = RequestState.of(scope).record
    record.error_code = error.code
    return _dialect_of(scope).refuse(error, record.request_id)


def _dialect_of(scope: Scope) -> Dialect:
    """The dialect of a request that no endpoint answers: that of its path, or of what its client sends."""
    path, headers = path_of(scope), Headers(scope=scope)
    for pattern, endpoint in PATTERNS:
        if pattern.match(path):
            return endpoint.chosen_by(headers).dialect
    of_path = (dialect for dialect in DIALECTS if dialect.prefix is not None and path.startswith(dialect.prefix))
    of_client = (dialect for dialect in DIALECTS if dialect.header is not None and dialect.header in headers)
    return next(chain(of_path, of_client), DIALECTS[0])
