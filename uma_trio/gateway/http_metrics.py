"""What the gateway measures itself: HTTP requests by route, dialect and status, and how long they take."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

# they double the number of series, and nobody looks at them
disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS: Final = (0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0, 300.0)
"""Upper bounds of buckets.  They are coarse, because each route has its own; the daemon's histograms are fine."""

LABELS: Final = ("route", "dialect")


class HttpMetrics:
    """Counts of one gateway process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "uma_http_requests",
            "Answered HTTP requests; status 499: the client left.",
            (*LABELS, "status"),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "uma_http_requests_in_flight", "HTTP requests that are being answered.", registry=self.registry
        )
        self.streams = Gauge("uma_http_streams_open", "Answers that are being streamed.", registry=self.registry)
        self.duration = Histogram(
            "uma_http_request_duration_seconds",
            "Time from an HTTP request to the end of its response.",
            LABELS,
            buckets=SECONDS,
            registry=self.registry,
        )
        self.response_start = Histogram(
            "uma_http_response_start_seconds",
            "Time from an HTTP request to the status of a streamed response, which comes with the first token.",
            LABELS,
            buckets=SECONDS,
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)
