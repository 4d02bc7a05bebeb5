"""Traces for OpenTelemetry: each HTTP request, and in it queue, prefill and decode of each of its answers.

The daemon takes no part: the last event of an answer says how long each phase took, and the spans are computed backwards
from its arrival.  Attributes have the names of OpenTelemetry's semantic conventions for HTTP and generative AI.

Needs the extra: ``pip install 'uma-trio[otel]'``.
"""

from __future__ import annotations

from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import uma_trio
from uma_trio.gateway.request_record import EndOfAnswer, RequestRecord
from uma_trio.protocol.parameters import ROWS

NAME: Final = "uma-trio"

ATTRIBUTES: Final = {row.name: row.trace for row in ROWS if row.trace is not None}
"""Fields of a request to the daemon, and what comes after ``gen_ai.request.`` for each."""

NS_PER_MS: Final = 1e6
INTERNAL_ERROR: Final = 500


class Tracer:
    """Makes the spans of each request when it has ended.

    Args:
        processor: gets the spans; must not block.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create({SERVICE_NAME: NAME, SERVICE_VERSION: uma_trio.__version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(processor)
        self._tracer = provider.get_tracer(NAME, uma_trio.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, seen: RequestRecord) -> None:
        """Make the spans of one request."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in seen.headers}
        span = self._tracer.start_span(
            f"{seen.method} {seen.route}",
            self._propagator.extract(carrier, Context()),
            SpanKind.SERVER,
            {
                "http.request.method": seen.method,
                "http.route": seen.route,
                "http.response.status_code": seen.status,
                "uma.request_id": seen.request_id,
                "uma.dialect": seen.dialect,
            },
            start_time=seen.began_ns,
        )
        if seen.error_code is not None:
            span.set_attribute("error.type", seen.error_code)
        if seen.status >= INTERNAL_ERROR:
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span, Context())
        for end in seen.ends:
            self._answer(seen, end, inside)
        span.end(seen.ended_ns)

    def _answer(self, seen: RequestRecord, end: EndOfAnswer, parent: Context) -> None:
        """Spans of one answer: the whole, and the phases that it came to."""
        timings = end.event.timings
        began_ns = end.at_ns - round(NS_PER_MS * timings.total_ms)
        operation = operation_of(seen)
        attributes = attributes_of(seen, end)
        name = f"{operation} {attributes.get('gen_ai.request.model', '')}".rstrip()
        span = self._tracer.start_span(name, parent, SpanKind.INTERNAL, attributes, start_time=began_ns)
        inside = set_span_in_context(span, Context())
        ttft_ms = timings.total_ms if timings.ttft_ms is None else timings.ttft_ms
        for phase, from_ms, to_ms in (
            ("queue", 0.0, timings.queue_ms),
            ("prefill", timings.queue_ms, ttft_ms),
            ("decode", ttft_ms, timings.total_ms),
        ):
            if to_ms > from_ms or phase == "queue":
                part = self._tracer.start_span(phase, inside, start_time=began_ns + round(NS_PER_MS * from_ms))
                part.end(began_ns + round(NS_PER_MS * to_ms))
        span.end(end.at_ns)


def operation_of(seen: RequestRecord) -> str:
    """What the request asked for, in the words of the conventions."""
    return "chat" if "messages" in seen.fields else "text_completion"


def attributes_of(seen: RequestRecord, end: EndOfAnswer) -> dict[str, Any]:
    """Attributes of one answer."""
    fields, event = seen.fields, end.event
    attributes = {
        "gen_ai.operation.name": operation_of(seen),
        "gen_ai.provider.name": NAME,
        "gen_ai.request.model": fields.get("model"),
        "gen_ai.conversation.id": fields.get("session_id"),
        "gen_ai.response.id": seen.request_id,
        "gen_ai.response.finish_reasons": [event.reason],
        "gen_ai.usage.input_tokens": event.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": event.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": event.usage.cached_tokens,
        "gen_ai.request.stream": seen.is_stream,
        **{f"gen_ai.request.{name}": fields.get(field) for field, name in ATTRIBUTES.items()},
    }
    return {name: value for name, value in attributes.items() if value is not None}


def otlp_tracer(endpoint: str) -> Tracer:
    """A tracer that sends its spans to ``endpoint`` over HTTP, in a thread.

    The ``OTEL_*`` variables of the SDK choose headers, sampling and further attributes of the resource.
    """
    return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
