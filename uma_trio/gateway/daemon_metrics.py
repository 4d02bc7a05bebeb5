"""A snapshot of the daemon's metrics as families of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from uma_trio.gateway.metric_names import EXPORTED, MS, PRINCIPALS, Exported, find

Snapshot = Mapping[str, Any]

MODEL: Final = "model"


class DaemonMetrics(Collector):
    """What one snapshot says.

    Args:
        snapshot: as docs/METRICS.md describes it; ``None`` if the daemon did not answer.
        for_vllm: also under the names that dashboards for vLLM use.
        principals: also by principal, which is for operators.
    """

    def __init__(self, snapshot: Snapshot | None, *, for_vllm: bool = False, principals: bool = True) -> None:
        self._snapshot = snapshot
        self._for_vllm = for_vllm
        self._exported = [each for each in EXPORTED if principals or each not in PRINCIPALS]

    def collect(self) -> Iterator[Metric]:
        """All families that the snapshot has numbers for."""
        snapshot = self._snapshot
        up = 0 if snapshot is None else 1
        yield GaugeMetricFamily("uma_up", "1 if the daemon answered this request for metrics.", up)
        if snapshot is None:
            return
        model = model_name(snapshot)
        yield InfoMetricFamily("uma_daemon", "The daemon.", {"version": str(snapshot.get("version", "")), MODEL: model})
        for each in self._exported:
            found = find(snapshot, each.path)
            if found is not None:
                yield family(each, found, model)
        yield _errors(snapshot)
        if self._for_vllm:
            yield from vllm_families(snapshot)


def model_name(snapshot: Snapshot) -> str:
    """The model as requests name it."""
    return str(snapshot.get("model", "")).removesuffix(".gguf")


def family(each: Exported, found: Any, model: str) -> Metric:
    """The family of one field of a snapshot."""
    labels = [MODEL] if each.of_model else []
    values = [model] if each.of_model else []
    if each.kind == "histogram":
        return histogram(each.name, each.help, found, dict(zip(labels, values, strict=True)), each.scale)
    cls = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
    if each.label is None:
        made = cls(each.name, each.help, labels=labels)
        made.add_metric(values, found * each.scale)
        return made
    made = cls(each.name, each.help, labels=[*labels, each.label])
    for key, value in found.items():
        made.add_metric([*values, key], (value if each.inner is None else value.get(each.inner, 0)) * each.scale)
    return made


def histogram(name: str, help: str, found: Mapping[str, Any], labels: Mapping[str, str], scale: float) -> Metric:
    """The family of one histogram of a snapshot, in the unit of ``name``."""
    made = HistogramMetricFamily(name, help, labels=[*labels])
    buckets = [(f"{bound * scale:.10g}", count) for bound, count in zip(found["bounds"], found["counts"], strict=True)]
    made.add_metric([*labels.values()], [*buckets, ("+Inf", found["count"])], found["sum"] * scale)
    return made


def errors_by_code(snapshot: Snapshot) -> Counter[str]:
    """Failed and rejected requests, and rejected connections."""
    ended = {reason: n for reason, n in snapshot.get("requests_total", {}).items() if reason.startswith("E_")}
    return Counter(ended) + Counter(snapshot.get("rejected_total", {}))


def _errors(snapshot: Snapshot) -> Metric:
    made = CounterMetricFamily("uma_errors_total", "Failed and rejected requests by error code.", labels=["code"])
    for code, n in errors_by_code(snapshot).items():
        made.add_metric([code], n)
    return made


# -- the names of vLLM ---------------------------------------------------------------------------------

FINISHED: Final = {"stop": "stop", "tool_calls": "stop", "length": "length", "cancelled": "abort"}
"""Our finish reasons in vLLM's words; error codes are ``error``."""

VLLM_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": "ttft_ms",
    "inter_token_latency_seconds": "inter_token_ms",
    "time_per_output_token_seconds": "inter_token_ms",  # until vLLM 0.10
    "e2e_request_latency_seconds": "request_ms",
    "request_queue_time_seconds": "request_queue_ms",
    "request_prefill_time_seconds": "request_prefill_ms",
    "request_decode_time_seconds": "request_decode_ms",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_tokens",
    "request_max_num_generation_tokens": "request_tokens",
}
"""Histograms of a snapshot by what vLLM calls them."""


def vllm_families(snapshot: Snapshot) -> Iterator[Metric]:
    """What dashboards for vLLM show.  Prompt tokens include cached ones there."""
    labels = {"model_name": model_name(snapshot)}
    cached, computed = snapshot.get("cached_tokens_total", 0), snapshot.get("prompt_tokens_total", 0)
    cells = find(snapshot, "kv.cells") or 0
    usage = (find(snapshot, "kv.cells_used") or 0) / cells if cells else 0.0
    gauges = {
        "num_requests_running": snapshot.get("running", 0),
        "num_requests_waiting": snapshot.get("queue_depth", 0),
        "kv_cache_usage_perc": usage,
        "gpu_cache_usage_perc": usage,  # until vLLM 0.10
    }
    counters = {
        "prompt_tokens": computed + cached,
        "generation_tokens": snapshot.get("tokens_total", 0),
        "prefix_cache_queries": computed + cached,
        "prefix_cache_hits": cached,
        "num_preemptions": 0,
        "spec_decode_num_draft_tokens": snapshot.get("draft_tokens_total", 0),
        "spec_decode_num_accepted_tokens": snapshot.get("accepted_draft_tokens_total", 0),
    }
    for name, value in gauges.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", "As vLLM calls it.", labels=[*labels])
        gauge.add_metric([*labels.values()], value)
        yield gauge
    for name, value in counters.items():
        counter = CounterMetricFamily(f"vllm:{name}", "As vLLM calls it.", labels=[*labels])
        counter.add_metric([*labels.values()], value)
        yield counter
    finished: Counter[str] = Counter(dict.fromkeys(FINISHED.values(), 0))
    for reason, n in snapshot.get("requests_total", {}).items():
        finished[FINISHED.get(reason, "error")] += n
    success = CounterMetricFamily("vllm:request_success", "As vLLM calls it.", labels=[*labels, "finished_reason"])
    for reason, n in finished.items():
        success.add_metric([*labels.values(), reason], n)
    yield success
    for name, field in VLLM_HISTOGRAMS.items():
        found = find(snapshot, f"histograms.{field}")
        if found is not None:
            scale = MS if field.endswith("_ms") else 1
            yield histogram(f"vllm:{name}", "As vLLM calls it.", found, labels, scale)
