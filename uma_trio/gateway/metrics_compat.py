"""A snapshot of the daemon's metrics under the names of vLLM or llama-server: ``--metrics-compat``.

It has the figures of the default model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import attrs

from uma_trio.telemetry.catalogue import METRICS, Kind, find

Snapshot: TypeAlias = Mapping[str, Any]


@attrs.frozen
class Entry:
    """One family of Prometheus."""

    name: str
    kind: Kind
    help: str
    value: Any
    """A number, numbers by the values of ``label``, or a histogram of the snapshot."""
    scale: float = 1
    """What turns ``value`` into the unit of ``name``."""
    label: str = ""
    labels: Mapping[str, str] = attrs.field(factory=dict)
    """Further labels."""


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


AS_VLLM: Final = "As vLLM calls it."


def vllm_entries(snapshot: Snapshot) -> Iterator[Entry]:
    """What dashboards for vLLM show.  Prompt tokens include cached ones there."""
    cached = snapshot.get("cached_tokens_total", 0)
    prompt_tokens = snapshot.get("prompt_tokens_total", 0) + cached
    cells = find(snapshot, "kv.cells") or 0
    # no other request can have reserved cells, so these say how full the cache is, as blocks in use do there
    usage = (find(snapshot, "kv.cells_reserved") or 0) / cells if cells else 0.0
    finished: Counter[str] = Counter(dict.fromkeys(FINISHED.values(), 0))
    for reason, n in snapshot.get("requests_total", {}).items():
        finished[FINISHED.get(reason, "error")] += n
    gauges = {
        "num_requests_running": snapshot.get("running", 0),
        "num_requests_waiting": snapshot.get("queue_depth", 0),
        "kv_cache_usage_perc": usage,
        "gpu_cache_usage_perc": usage,  # until vLLM 0.10
    }
    counters = {
        "prompt_tokens": prompt_tokens,
        "generation_tokens": snapshot.get("tokens_total", 0),
        "prefix_cache_queries": prompt_tokens,
        "prefix_cache_hits": cached,
        "num_preemptions": snapshot.get("preemptions_total", 0),
        "spec_decode_num_draft_tokens": snapshot.get("draft_tokens_total", 0),
        "spec_decode_num_accepted_tokens": snapshot.get("accepted_draft_tokens_total", 0),
    }
    for name, value in gauges.items():
        yield Entry(f"vllm:{name}", "gauge", AS_VLLM, value)
    for name, value in counters.items():
        yield Entry(f"vllm:{name}", "counter", AS_VLLM, value)
    if adapters := snapshot.get("adapters"):
        in_use = {
            state: ",".join(sorted(name for name, adapter in adapters.items() if adapter[state]))
            for state in ("running", "waiting")
        }
        labels = {
            "max_lora": str(len(adapters)),
            **{f"{state}_lora_adapters": names for state, names in in_use.items()},
        }
        yield Entry("vllm:lora_requests_info", "gauge", AS_VLLM, time.time(), labels=labels)
    yield Entry("vllm:request_success", "counter", AS_VLLM, finished, label="finished_reason")
    for name, field in VLLM_HISTOGRAMS.items():
        path = f"histograms.{field}"
        if (histogram := find(snapshot, path)) is not None:
            yield Entry(f"vllm:{name}", "histogram", AS_VLLM, histogram, METRICS[path].scale)


def llama_server_entries(snapshot: Snapshot) -> Iterator[Entry]:
    """What dashboards for llama-server show.

    The tokens of texts that were embedded count as prompt tokens, and the steps that computed them are not counted.
    """
    embedded = find(snapshot, "embeddings.tokens_total") or 0
    prompt_n, predicted_n = snapshot.get("prompt_tokens_total", 0), snapshot.get("tokens_total", 0)
    prompt_s, predicted_s = (
        (find(snapshot, f"histograms.{name}.sum") or 0) * METRICS[f"histograms.{name}"].scale
        for name in ("request_prefill_ms", "request_decode_ms")
    )
    of_ours = {
        "prompt_tokens_cached": "cached_tokens_total",
        "tokens_predicted": "tokens_total",
        "n_decode": "decode_calls_total",
        "spec_decode_num_draft_tokens": "draft_tokens_total",
        "spec_decode_num_accepted_tokens": "accepted_draft_tokens_total",
        "requests_processing": "running",
        "requests_deferred": "queue_depth",
    }
    counters = {
        "prompt_tokens": ("Prompt tokens that were computed.", prompt_n + embedded),
        "prompt_seconds": ("Time in prefill, all requests together.", prompt_s),
        "tokens_predicted_seconds": ("Time in decode, all complete answers together.", predicted_s),
    }
    gauges = {
        "prompt_tokens_seconds": ("Computed prompt tokens per second of prefill.", _rate(prompt_n, prompt_s)),
        "predicted_tokens_seconds": ("Generated tokens per second of decode.", _rate(predicted_n, predicted_s)),
        "n_busy_slots_per_decode": ("Mean number of sequences in a tick.", snapshot.get("avg_batch") or 0),
    }
    for name, path in of_ours.items():
        metric = METRICS[path]
        assert metric.kind is not None
        yield Entry(f"llamacpp:{name}", metric.kind, metric.help, snapshot.get(path, 0))
    for name, (help, value) in counters.items():
        yield Entry(f"llamacpp:{name}", "counter", help, value)
    for name, (help, value) in gauges.items():
        yield Entry(f"llamacpp:{name}", "gauge", help, value)


def _rate(n: float, seconds: float) -> float:
    return n / seconds if seconds else 0.0
