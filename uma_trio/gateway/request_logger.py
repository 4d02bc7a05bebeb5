"""Watches every HTTP request from outside: counts it, logs it, traces it.

Endpoints add what only they know to the request's ``RequestRecord``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, Protocol

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from uma_trio.gateway.request_record import NO_ROUTE, RequestRecord
from uma_trio.gateway.request_state import RequestState

log = structlog.get_logger("uma_trio.gateway")
access_log = structlog.get_logger("uma_trio.gateway.access")

STREAMS: Final = (b"text/event-stream", b"application/x-ndjson")

SECONDS: Final = (0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0, 300.0)
"""Upper bounds of the gateway's buckets.  They are coarse, because each route has its own; the daemon's are fine."""


class HttpMetrics:
    """What one gateway process measures: HTTP requests by route, dialect and status, and how long they take."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        by = ("route", "dialect")
        self.requests = prometheus_client.Counter(
            "uma_http_requests",
            "Answered HTTP requests; status 499: the client left.",
            (*by, "status"),
            registry=registry,
        )
        self.in_flight = prometheus_client.Gauge(
            "uma_http_requests_in_flight", "HTTP requests that are being answered.", registry=registry
        )
        self.streams = prometheus_client.Gauge(
            "uma_http_streams_open", "Answers that are being streamed.", registry=registry
        )
        self.duration = prometheus_client.Histogram(
            "uma_http_request_duration_seconds",
            "Time from an HTTP request to the end of its response.",
            by,
            buckets=SECONDS,
            registry=registry,
        )
        self.response_start = prometheus_client.Histogram(
            "uma_http_response_start_seconds",
            "Time from an HTTP request to the status of a streamed response, which comes with the first token.",
            by,
            buckets=SECONDS,
            registry=registry,
        )
        ProcessCollector(registry=registry)


class Tracer(Protocol):
    """Gets each observation when its request has ended."""

    def record(self, observation: RequestRecord) -> None: ...


class RequestLogger:
    """Observes all requests to ``app``.

    Args:
        dialects: name of the dialect by method and route.
        logs: write a line for each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        dialects: Mapping[tuple[str, str], str],
        *,
        logs: bool,
        tracer: Tracer | None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._dialects = dialects
        self._logs = logs
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = RequestState.of(scope)
        seen = state.record
        began = time.perf_counter()
        started: float | None = None

        async def observed_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = time.perf_counter()
                seen.status = message["status"]
                content_type = dict(message["headers"]).get(b"content-type", b"")
                seen.is_stream = content_type.startswith(STREAMS)
                if seen.is_stream:
                    self._metrics.streams.inc()
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, observed_send)
        finally:
            self._metrics.in_flight.dec()
            if seen.is_stream:
                self._metrics.streams.dec()
            route = scope.get("route")
            seen.route = NO_ROUTE if route is None else route.path
            seen.dialect = self._dialects.get((seen.method, seen.route), "")
            seen.tenant = None if state.tenant is None else state.tenant.name
            self._end(seen, began, started)

    def _end(self, seen: RequestRecord, began: float, started: float | None) -> None:
        ended = time.perf_counter()
        seen.ended_ns = seen.began_ns + round(1e9 * (ended - began))
        labels = seen.route, seen.dialect
        self._metrics.requests.labels(*labels, str(seen.status)).inc()
        self._metrics.duration.labels(*labels).observe(ended - began)
        if started is not None and seen.is_stream:
            self._metrics.response_start.labels(*labels).observe(started - began)
        if self._logs:
            _log(seen, ended - began)
        if self._tracer is not None:
            self._tracer.record(seen)


def _log(seen: RequestRecord, duration_s: float) -> None:
    usages = [end.event.usage for end in seen.ends]
    access_log.info(
        "http",
        id=seen.request_id,
        session=seen.fields.get("session_id"),
        tenant=seen.tenant,
        method=seen.method,
        route=seen.route,
        dialect=seen.dialect or None,
        status=seen.status,
        duration_ms=round(1e3 * duration_s, 3),
        stream=seen.is_stream,
        prompt_tokens=usages[0].prompt_tokens if usages else None,
        tokens=sum(usage.completion_tokens for usage in usages) if usages else None,
        reason=seen.ends[0].event.reason if seen.ends else None,
        code=seen.error_code,
    )
