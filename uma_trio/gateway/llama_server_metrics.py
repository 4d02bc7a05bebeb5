"""A snapshot of the daemon's metrics under the names of llama-server: ``--metrics-compat llama-server``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from uma_trio.gateway.metric_names import MS, find


def llama_server_families(snapshot: Mapping[str, Any]) -> Iterator[Metric]:
    """What dashboards for llama-server show: the default model, without labels.

    The tokens of texts that were embedded count as prompt tokens, and the steps that computed them are not counted.
    """
    embedded = find(snapshot, "embeddings.tokens_total") or 0
    prompt_n, predicted_n = snapshot.get("prompt_tokens_total", 0), snapshot.get("tokens_total", 0)
    prompt_s = (find(snapshot, "histograms.request_prefill_ms.sum") or 0) * MS
    predicted_s = (find(snapshot, "histograms.request_decode_ms.sum") or 0) * MS
    counters = {
        "prompt_tokens": ("Prompt tokens that were computed.", prompt_n + embedded),
        "prompt_tokens_cached": ("Prompt tokens that were in the KV cache.", snapshot.get("cached_tokens_total", 0)),
        "prompt_seconds": ("Time in prefill, all requests together.", prompt_s),
        "tokens_predicted": ("Generated tokens.", predicted_n),
        "tokens_predicted_seconds": ("Time in decode, all complete answers together.", predicted_s),
        "n_decode": ("Calls of llama_decode.", snapshot.get("decode_calls_total", 0)),
        "spec_decode_num_draft_tokens": ("Draft tokens that were checked.", snapshot.get("draft_tokens_total", 0)),
        "spec_decode_num_accepted_tokens": (
            "Draft tokens that were accepted.",
            snapshot.get("accepted_draft_tokens_total", 0),
        ),
    }
    gauges = {
        "prompt_tokens_seconds": ("Computed prompt tokens per second of prefill.", _rate(prompt_n, prompt_s)),
        "predicted_tokens_seconds": ("Generated tokens per second of decode.", _rate(predicted_n, predicted_s)),
        "requests_processing": ("Requests in prefill or decode.", snapshot.get("running", 0)),
        "requests_deferred": ("Requests that wait.", snapshot.get("queue_depth", 0)),
        "n_busy_slots_per_decode": ("Mean number of sequences in a tick.", snapshot.get("avg_batch") or 0),
    }
    for name, (help, value) in counters.items():
        yield CounterMetricFamily(f"llamacpp:{name}", help, value)
    for name, (help, value) in gauges.items():
        yield GaugeMetricFamily(f"llamacpp:{name}", help, value)


def _rate(n: float, seconds: float) -> float:
    return n / seconds if seconds else 0.0
