"""Traces: spans computed backwards from the last event, under the names of OpenTelemetry's conventions."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from opentelemetry.trace import SpanKind

from tests.support.cases import all_cases
from uma_trio.gateway.request_record import EndOfAnswer, RequestRecord
from uma_trio.gateway.tracing import Tracer
from uma_trio.protocol.events import Eos
from uma_trio.protocol.usage import Timings, Usage

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECOND = 1_000_000_000
KNOWN = {
    value
    for module in (gen_ai_attributes, http_attributes, error_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}


def end(*, at_s: float = 100.0, ttft_ms: float | None = 300.0) -> EndOfAnswer:
    event = Eos(
        id="r",
        reason="stop",
        usage=Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3),
        timings=Timings(queue_ms=100.0, ttft_ms=ttft_ms, total_ms=1000.0, tokens_per_s=None),
    )
    return EndOfAnswer(event, round(at_s * SECOND))


def spans(*ends: EndOfAnswer, **values: Any) -> dict[str, ReadableSpan]:
    """The spans of one request by name."""
    exporter = InMemorySpanExporter()
    fields = {"messages": [], "model": "qwen", "temperature": 0.5, "max_tokens": 9, "stop": ["."], "session_id": "s"}
    seen = RequestRecord(
        "r",
        "POST",
        [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())],
        **{
            "began_ns": 98 * SECOND,
            "ended_ns": 101 * SECOND,
            "route": "/v1/chat/completions",
            "status": 200,
            "dialect": "openai",
            "fields": fields,
            "ends": [*ends],
            **values,
        },
    )
    Tracer(SimpleSpanProcessor(exporter)).record(seen)
    return {span.name: span for span in exporter.get_finished_spans()}


def times_s(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / SECOND, span.end_time / SECOND


def test_each_phase_is_a_span_that_ends_where_the_next_one_begins() -> None:
    found = spans(end())
    assert {name: times_s(span) for name, span in found.items()} == {
        "POST /v1/chat/completions": (98, 101),
        "chat qwen": (99, 100),
        "queue": (99, 99.1),
        "prefill": (99.1, 99.3),
        "decode": (99.3, 100),
    }
    request, answer = found["POST /v1/chat/completions"], found["chat qwen"]
    assert request.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert answer.parent is not None
    assert answer.parent.span_id == request.context.span_id
    assert {found[name].parent.span_id for name in ("queue", "prefill", "decode")} == {answer.context.span_id}
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    assert request.kind is SpanKind.SERVER


def test_attributes_have_the_names_of_the_conventions() -> None:
    found = spans(end())
    for span in found.values():
        assert {name for name in span.attributes or {} if not name.startswith("uma.")} <= KNOWN
    assert dict(found["chat qwen"].attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "uma-trio",
        "gen_ai.request.model": "qwen",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": (".",),
        "gen_ai.request.stream": False,
        "gen_ai.conversation.id": "s",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
    }


def test_a_request_that_was_cancelled_in_prefill_has_no_decode() -> None:
    assert {*spans(end(ttft_ms=None))} == {"POST /v1/chat/completions", "chat qwen", "queue", "prefill"}


def test_a_refused_request_is_one_span_with_its_code() -> None:
    [span] = spans(status=503, error_code="E_GATEWAY_LOADING").values()
    assert (span.attributes or {})["error.type"] == "E_GATEWAY_LOADING"
    assert not span.status.is_ok
    [span] = spans(status=429, error_code="E_LIMIT_QUEUE").values()
    assert span.status.is_unset


@all_cases("header", [b"", b"00-0-0-0", b"\xff" * 99])
def test_without_a_usable_traceparent_a_trace_begins_here(header: bytes) -> None:
    exporter = InMemorySpanExporter()
    Tracer(SimpleSpanProcessor(exporter)).record(RequestRecord("r", "GET", [(b"traceparent", header)], ended_ns=1))
    [span] = exporter.get_finished_spans()
    assert span.parent is None
