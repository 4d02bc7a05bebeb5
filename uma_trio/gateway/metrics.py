"""Metrics for Prometheus: those of the daemon by the table of ``telemetry/catalogue.py``, and those of the gateway."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response

from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import HttpError
from uma_trio.gateway.guard import HeaderName
from uma_trio.gateway.metrics_compat import Snapshot, llama_server_entries, vllm_entries
from uma_trio.gateway.request_logger import HttpMetrics
from uma_trio.telemetry import catalogue
from uma_trio.telemetry.catalogue import ANY, METRICS, Kind, find

# they double the number of series, and nobody looks at them
disable_created_metrics()  # type: ignore[no-untyped-call]

PROCESS_START: Final = HeaderName(b"Process-Start-Time-Unix")
"""llama-server's header for when counters were 0, in seconds since 1970."""

Labels = Mapping[str, str]


@attrs.frozen
class AllMetrics(Collector):
    """What one snapshot of the daemon says, then what the gateway measured.

    Args:
        snapshot: as docs/METRICS.md describes it; ``None`` if the daemon did not answer.
        own: the gateway's.
        compat: also under the names that dashboards for this program use.
        principals: also by principal, which is for operators.
    """

    snapshot: Snapshot | None
    own: CollectorRegistry = attrs.field(factory=CollectorRegistry)
    compat: str = "none"
    principals: bool = True

    def collect(self) -> Iterator[Metric]:
        """All families that there are numbers for."""
        up = self.snapshot is not None
        yield family("uma_up", "gauge", "1 if the daemon answered this request for metrics.", [({}, up)])
        if self.snapshot is not None:
            yield from self._of_daemon(self.snapshot)
        yield from self.own.collect()

    def _of_daemon(self, snapshot: Snapshot) -> Iterator[Metric]:
        model, models = model_name(snapshot), by_model(snapshot)
        info = {"version": str(snapshot.get("version", "")), "model": model}
        yield InfoMetricFamily("uma_daemon", "The daemon.", info)
        for metric in METRICS.values():
            if metric.kind is None or (metric.path.startswith("principals.") and not self.principals):
                continue
            values = {
                name: _read(metric, of_model) for name, of_model in models.items() if metric.of_model or name == model
            }
            measured = [
                sample
                for name, value in values.items()
                if value is not None
                for sample in label_samples({"model": name} if metric.of_model else {}, metric.label, value)
            ]
            if any(value is not None for value in values.values()):
                yield family(metric.prometheus_name, metric.kind, metric.help, measured, metric.scale)
        codes = errors_by_code(snapshot)
        help = "Failed and rejected requests by error code."
        yield family("uma_errors_total", "counter", help, label_samples({}, "code", codes))
        if self.compat == "vllm":
            for entry in vllm_entries(snapshot):
                samples = label_samples({"model_name": model, **entry.labels}, entry.label, entry.value)
                yield family(entry.name, entry.kind, entry.help, samples, entry.scale)
        elif self.compat == "llama-server":
            for entry in llama_server_entries(snapshot):
                yield family(entry.name, entry.kind, entry.help, [({}, entry.value)])


def _read(metric: catalogue.Metric, snapshot: Snapshot) -> Any:
    """The value of ``metric``, by the values of its label if it has one; ``None`` if the daemon has not measured it."""
    parent, is_inner, field = metric.path.rpartition(ANY)
    if not is_inner:
        return find(snapshot, field)
    by_label = find(snapshot, parent)
    return None if by_label is None else {name: values.get(field) or 0 for name, values in by_label.items()}


def label_samples(labels: Labels, label: str, value: Any) -> list[tuple[Labels, Any]]:
    """The samples of a value: one, or if there is a ``label`` one for each of its values."""
    return [({**labels, label: key}, labelled) for key, labelled in value.items()] if label else [(labels, value)]


def family(name: str, kind: Kind, help: str, samples: Sequence[tuple[Labels, Any]], scale: float = 1) -> Metric:
    """A family of Prometheus.

    Args:
        samples: numbers, or histograms of a snapshot, with labels that have the same names.
        scale: what turns them into the unit of ``name``.
    """
    labels = [*samples[0][0]] if samples else []
    if kind != "histogram":
        made = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, help, labels=labels)
        for of, value in samples:
            made.add_metric([*of.values()], value * scale)
        return made
    distribution = HistogramMetricFamily(name, help, labels=labels)
    for of, value in samples:
        counts = zip(value["bounds"], value["counts"], strict=True)
        buckets = [(f"{bound * scale:.10g}", count) for bound, count in counts]
        distribution.add_metric([*of.values()], [*buckets, ("+Inf", value["count"])], value["sum"] * scale)
    return distribution


def model_name(snapshot: Snapshot) -> str:
    """The model as requests name it."""
    return str(snapshot.get("model", ""))


def by_model(snapshot: Snapshot) -> dict[str, Snapshot]:
    """The snapshots of all models that are loaded, by name; the first one is that of the daemon itself."""
    by_name = {model_name(snapshot): snapshot}
    for name, model in snapshot.get("models", {}).items():
        if "metrics" in model:
            by_name[name] = model["metrics"]
    return by_name


def errors_by_code(snapshot: Snapshot) -> Counter[str]:
    """Failed and rejected requests of all models, and rejected connections."""
    counts: Counter[str] = Counter(snapshot.get("rejected_total", {}))
    for of_model in by_model(snapshot).values():
        ended = of_model.get("requests_total", {})
        counts.update({reason: n for reason, n in ended.items() if reason.startswith("E_")})
    return counts


async def metrics(call: Call) -> Response:
    """All metrics, in the format of Prometheus.  Never waits for the model; without a daemon ``uma_up`` is 0."""
    try:
        snapshot = await call.daemon.metrics()
    except HttpError:
        snapshot = None
    tenant = call.state.tenant
    compat = call.config.http.metrics_compat
    own: HttpMetrics = call.request.app.state.http_metrics
    all_metrics = AllMetrics(snapshot, own.registry, compat=compat, principals=tenant is None or tenant.admin)
    encode, content_type = choose_encoder(call.request.headers.get("accept", ""))
    response = Response(encode(all_metrics), headers={"content-type": content_type})
    if compat == "llama-server" and snapshot is not None:
        began_at = round(time.time() - snapshot["uptime_s"])
        response.raw_headers.append((PROCESS_START, str(began_at).encode()))
    return response


ENDPOINTS = (OPENAI.get("/metrics", metrics, media_types=("text/plain",)),)
