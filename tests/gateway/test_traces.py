"""Traces of a real gateway, received as an OpenTelemetry collector would."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import missing, real_daemon

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(HTTPServer):
    """Keeps the spans that it gets, by name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: dict[str, Any] = {}
        self.has_all = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans |= {span.name: span for span in scope.spans}
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
        if {"queue", "POST /v1/chat/completions"} <= set(self.server.spans):
            self.server.has_all.set()

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_request_goes_on_with_the_trace_of_its_client(collector: Collector) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    flags = ("--http", "0", "--otlp-endpoint", url)
    with real_daemon(*flags, environment={"OTEL_BSP_SCHEDULE_DELAY": "50"}) as daemon:
        with Gateway.of(daemon).http() as client:
            answer = client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True},
                headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
            )
            assert answer.status_code == 200
        assert collector.has_all.wait(60)
    spans = collector.spans
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert {"POST /v1/chat/completions", "queue", "prefill", "decode"} <= set(spans)
    request, [answer] = (
        spans["POST /v1/chat/completions"],
        [span for name, span in spans.items() if "chat" in name.split()],
    )
    assert answer.parent_span_id == request.span_id
    assert spans["decode"].parent_span_id == answer.span_id
    assert spans["queue"].start_time_unix_nano == answer.start_time_unix_nano
    assert spans["decode"].end_time_unix_nano == answer.end_time_unix_nano
    attributes = {each.key: each.value.int_value for each in answer.attributes}
    assert attributes["gen_ai.usage.output_tokens"] == 5
