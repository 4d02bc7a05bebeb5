"""A snapshot of the daemon's metrics as families of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from uma_trio.gateway.llama_server_metrics import llama_server_families
from uma_trio.gateway.metric_names import EXPORTED, MS, PRINCIPALS, Exported, find

Snapshot = Mapping[str, Any]

MODEL: Final = "model"


class DaemonMetrics(Collector):
    """What one snapshot says.

    Args:
        snapshot: as docs/METRICS.md describes it; ``None`` if the daemon did not answer.
        compat: also under the names that dashboards for this program use.
        principals: also by principal, which is for operators.
    """

    def __init__(self, snapshot: Snapshot | None, *, compat: str = "none", principals: bool = True) -> None:
        self._snapshot = snapshot
        self._compat = compat
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
        snapshots = by_model(snapshot)
        for each in self._exported:
            found = {
                name: value
                for name, of_model in (snapshots if each.of_model else {model: snapshot}).items()
                if (value := find(of_model, each.path)) is not None
            }
            if found:
                yield family(each, found)
        yield _errors(snapshot)
        if self._compat == "vllm":
            yield from vllm_families(snapshot)
        elif self._compat == "llama-server":
            yield from llama_server_families(snapshot)


def model_name(snapshot: Snapshot) -> str:
    """The model as requests name it."""
    return str(snapshot.get("model", "")).removesuffix(".gguf")


def by_model(snapshot: Snapshot) -> dict[str, Snapshot]:
    """The snapshots of all models that are loaded, by name; the first one is that of the daemon itself."""
    found = {model_name(snapshot): snapshot}
    for name, model in snapshot.get("models", {}).items():
        if "metrics" in model:
            found[name] = model["metrics"]
    return found


def family(each: Exported, found: Mapping[str, Any]) -> Metric:
    """The family of one field of a snapshot.

    Args:
        found: its values by model; of the daemon's own fields it has one.
    """
    labels = [MODEL] if each.of_model else []
    if each.kind == "histogram":
        return histogram(each.name, each.help, [({MODEL: name}, value) for name, value in found.items()], each.scale)
    cls = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
    made = cls(each.name, each.help, labels=labels if each.label is None else [*labels, each.label])
    for model, value in found.items():
        values = [model] if each.of_model else []
        if each.label is None:
            made.add_metric(values, value * each.scale)
            continue
        for key, one in value.items():
            made.add_metric([*values, key], (one if each.inner is None else one.get(each.inner) or 0) * each.scale)
    return made


def histogram(name: str, help: str, found: Sequence[tuple[Mapping[str, str], Any]], scale: float) -> Metric:
    """The family of one histogram of a snapshot, in the unit of ``name``.

    Args:
        found: pairs of labels, which have the same names, and values.
    """
    made = HistogramMetricFamily(name, help, labels=[*found[0][0]])
    for labels, value in found:
        counts = zip(value["bounds"], value["counts"], strict=True)
        buckets = [(f"{bound * scale:.10g}", count) for bound, count in counts]
        made.add_metric([*labels.values()], [*buckets, ("+Inf", value["count"])], value["sum"] * scale)
    return made


def errors_by_code(snapshot: Snapshot) -> Counter[str]:
    """Failed and rejected requests of all models, and rejected connections."""
    found: Counter[str] = Counter(snapshot.get("rejected_total", {}))
    for of_model in by_model(snapshot).values():
        ended = of_model.get("requests_total", {})
        found.update({reason: n for reason, n in ended.items() if reason.startswith("E_")})
    return found


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
        "num_preemptions": snapshot.get("preemptions_total", 0),
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
            yield histogram(f"vllm:{name}", "As vLLM calls it.", [(labels, found)], scale)
