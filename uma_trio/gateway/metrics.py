"""Metrics for Prometheus: those of the daemon, as it says them now, and those of the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import attrs
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response

from uma_trio.gateway.daemon_metrics import DaemonMetrics
from uma_trio.gateway.dialects.openai import OPENAI
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import HttpError
from uma_trio.gateway.header_names import HeaderName
from uma_trio.gateway.http_metrics import HttpMetrics

PROCESS_START: Final = HeaderName(b"Process-Start-Time-Unix")
"""llama-server's header for when counters were 0, in seconds since 1970."""


@attrs.frozen
class CombinedCollector(Collector):
    """The metrics of several collectors."""

    collectors: tuple[Collector, ...]

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for collector in self.collectors:
            yield from collector.collect()


async def metrics(call: Call) -> Response:
    """All metrics.  Never waits for the model; without a daemon ``uma_up`` is 0."""
    try:
        snapshot = await call.daemon.metrics()
    except HttpError:
        snapshot = None
    tenant = call.request.scope["state"].get("tenant")
    of_daemon = DaemonMetrics(
        snapshot,
        compat=call.config.http.metrics_compat,
        principals=tenant is None or tenant.admin,
    )
    own: HttpMetrics = call.request.app.state.http_metrics
    encode, content_type = choose_encoder(call.request.headers.get("accept", ""))
    content = encode(CombinedCollector((of_daemon, own.registry)))
    response = Response(content, headers={"content-type": content_type})
    if call.config.http.metrics_compat == "llama-server" and snapshot is not None:
        began_at = round(time.time() - snapshot["uptime_s"])
        response.raw_headers.append((PROCESS_START, str(began_at).encode()))
    return response


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/metrics",
        dialect=OPENAI,
        answer=metrics,
        summary="Metrics in the format of Prometheus",
        media_types=("text/plain",),
    ),
)
