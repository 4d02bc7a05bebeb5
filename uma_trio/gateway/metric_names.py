"""The daemon's metrics as Prometheus calls them: ``uma_*``, in seconds and bytes, with the unit in the name.

docs/METRICS.md explains each field of a snapshot.  Percentiles and means are left out where there is a histogram.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

Kind = Literal["counter", "gauge", "histogram"]

MS: Final = 1e-3
"""Seconds."""


@attrs.frozen
class Exported:
    """One family of Prometheus, made of one field of a snapshot."""

    name: str
    path: str
    """Where it is in a snapshot: ``kv.cells``."""
    help: str
    kind: Kind
    scale: float = 1
    """What turns the snapshot's unit into that of ``name``."""
    label: str | None = None
    """The field is an object, and each of its keys is a value of this label."""
    inner: str | None = None
    """Which field of the values of that object; ``None``: they are numbers."""
    of_model: bool = True
    """Belongs to the model and has its name as a label; otherwise to the daemon."""


def find(snapshot: Mapping[str, Any], path: str) -> Any:
    """A field of a snapshot; ``None`` if the daemon has not measured it."""
    found: Any = snapshot
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _counter(name: str, path: str, help: str, **options: Any) -> Exported:
    return Exported(f"uma_{name}_total", path, help, "counter", **options)


def _gauge(name: str, path: str, help: str, **options: Any) -> Exported:
    return Exported(f"uma_{name}", path, help, "gauge", **options)


def _seconds(name: str, field: str, help: str) -> Exported:
    return Exported(f"uma_{name}_seconds", f"histograms.{field}", help, "histogram", MS)


def _sizes(name: str, field: str, help: str) -> Exported:
    return Exported(f"uma_{name}", f"histograms.{field}", help, "histogram")


LOAD: Final = (
    _gauge("requests_running", "running", "Requests in prefill or decode."),
    _gauge("requests_waiting", "queue_depth", "Requests that wait for a sequence or for room in the KV cache."),
    _counter("requests", "requests_total", "Ended answers by finish reason or error code.", label="reason"),
    _counter(
        "rejected",
        "rejected_total",
        "Rejected requests and connections by error code.",
        label="code",
        of_model=False,
    ),
    _counter("preemptions", "preemptions_total", "Streams that lost their places to requests that waited."),
    _gauge("connections", "connections", "Open connections of the Unix socket.", of_model=False),
    _gauge("send_queue_bytes", "send_queue_bytes", "Data for clients that do not read.", of_model=False),
    _gauge("uptime_seconds", "uptime_s", "Time since the model was loaded.", of_model=False),
    _gauge("draining", "draining", "1 while the daemon is stopping.", of_model=False),
    _counter("perf_log_dropped", "perf_log_dropped_total", "Records missing in the perf log.", of_model=False),
)

THROUGHPUT: Final = (
    _counter("tokens", "tokens_total", "Generated tokens."),
    _counter("prompt_tokens", "prompt_tokens_total", "Prompt tokens that were computed."),
    _counter("cached_tokens", "cached_tokens_total", "Prompt tokens that came from the KV cache."),
    _counter("prefix_cache_hits", "prefix_cache_hits_total", "Requests whose prompt began in the KV cache."),
    _counter("draft_tokens", "draft_tokens_total", "Draft tokens that were checked."),
    _counter("accepted_draft_tokens", "accepted_draft_tokens_total", "Draft tokens that were accepted."),
    _counter("model_draft_tokens", "model_draft_tokens_total", "Draft tokens of the draft model that were checked."),
    _counter(
        "accepted_model_draft_tokens",
        "accepted_model_draft_tokens_total",
        "Draft tokens of the draft model that were accepted.",
    ),
    _counter("forced_tokens", "forced_tokens_total", "Tokens that were the only ones a constraint allowed."),
    _counter("late_masks", "late_masks_total", "Samples whose mask was not ready in time."),
    _counter("ticks", "ticks_total", "Completed ticks."),
    _counter("decode_calls", "decode_calls_total", "Calls of llama_decode."),
    _counter("mixed_ticks", "mixed_ticks_total", "Ticks with decodes and prefill."),
    _counter("mixed_run_ahead_steps", "mixed_run_ahead_steps_total", "Those of them that ran ahead."),
    _counter("run_ahead_steps", "run_ahead_steps_total", "Ticks submitted while the previous one computed."),
)

LATENCY: Final = (
    _seconds("time_to_first_token", "ttft_ms", "Time from the arrival of a request to its first token."),
    _seconds("inter_token_latency", "inter_token_ms", "Time between the tokens of an answer."),
    _seconds("request_duration", "request_ms", "Time from the arrival of a request to the end of a complete answer."),
    _seconds("request_queue", "request_queue_ms", "Time from the arrival of a request until it had its KV cells."),
    _seconds("request_prefill", "request_prefill_ms", "Time from then to the first token."),
    _seconds("request_decode", "request_decode_ms", "Time from the first token to the end of a complete answer."),
    _seconds("tick_duration", "tick_ms", "Time that a tick spends in llama_decode and in sampling."),
    _sizes("batch_sequences", "batch", "Sequences in a tick, prefill included."),
    _sizes("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a complete answer."),
    _sizes("request_tokens", "request_tokens", "Tokens of a complete answer."),
)

TICKS: Final = (
    _gauge("host_gap_ratio", "host_gap_share", "Time between ticks, of all time with work, since the start."),
    _gauge("logits_zero_copy_ratio", "logits_zero_copy_share", "Rows of logits that were sampled without a copy."),
    _gauge("memory_bandwidth_ratio", "memory_bandwidth_share", "Estimated memory traffic, of the measured bandwidth."),
    _gauge("tick_prediction_error_ratio", "tick_prediction_error", "Recent error of the cost model."),
    _gauge("mixed_tick_error_p50_ratio", "mixed_tick_error_p50", "Error of mixed ticks, median."),
    _gauge("mixed_tick_error_p90_ratio", "mixed_tick_error_p90", "Error of mixed ticks, 90th percentile."),
)

MEMORY: Final = (
    _gauge("kv_bytes", "kv.bytes", "Size of the KV cache."),
    _gauge("kv_used_bytes", "kv.bytes_used", "Size of the cells that hold a token."),
    _gauge("kv_reserved_bytes", "kv.bytes_reserved", "Size of the cells of running and of ended requests."),
    _gauge("kv_cells", "kv.cells", "Cells of the KV cache, each for one token."),
    _gauge("kv_used_cells", "kv.cells_used", "Cells of running requests that hold a token."),
    _gauge("kv_reserved_cells", "kv.cells_reserved", "Cells of running requests."),
    _gauge("kv_cached_cells", "kv.cached_cells", "Cells of ended requests, kept for prefix reuse."),
    _gauge("kv_sequences", "kv.sequences", "Sequences of running requests."),
    _gauge("kv_cached_sequences", "kv.cached_sequences", "Sequences of ended requests, kept for prefix reuse."),
    _gauge("preempted_bytes", "preempted_bytes", "Memory for the KV cache of streams that lost their places."),
    _counter("kv_evicted", "kv.evicted_total", "Cached sequences that were evicted."),
    _gauge("kv_saved_states", "kv.saved_states", "Session states on disk."),
    _gauge("kv_saved_bytes", "kv.saved_bytes", "Size of the session states on disk."),
    _counter("kv_offload_saved", "kv_offload.saved_total", "Saved session states."),
    _counter("kv_offload_saved_bytes", "kv_offload.saved_bytes_total", "Size of saved session states."),
    _counter("kv_offload_loaded", "kv_offload.loaded_total", "Loaded session states."),
    _counter("kv_offload_loaded_bytes", "kv_offload.loaded_bytes_total", "Size of loaded session states."),
    _counter("kv_offload_save_failed", "kv_offload.save_failed_total", "Session states that could not be saved."),
    _counter("kv_offload_load_failed", "kv_offload.load_failed_total", "Session states that could not be loaded."),
    _gauge("kv_offload_disk_bytes", "kv_offload.disk_bytes", "Size of all files of session states."),
)

PARTS: Final = (
    _counter("engine_restarts", "engine.restarts_total", "Restarts of the engine after a crash or a hang."),
    _gauge("engine_resident_bytes", "engine.rss_bytes", "Resident memory of the engine, mapped weights included."),
    _counter("engine_cpu_seconds", "engine.cpu_s", "CPU time of the engine since it was last started."),
    _counter("gateway_restarts", "gateway.restarts_total", "Restarts of the gateway after its end.", of_model=False),
    _gauge("controllers_sequences", "controllers.sequences", "Answers that a controller steers."),
    _counter("controllers_skipped", "controllers.skipped_total", "Masks of controllers that were not there in time."),
    _counter("controllers_restarts", "controllers.restarts_total", "Restarts of the runtime of controllers."),
    _counter("controllers_cpu_seconds", "controllers.cpu_s", "CPU time of the runtime since it was last started."),
    _gauge("controllers_resident_bytes", "controllers.rss_bytes", "Resident memory of the runtime of controllers."),
    _gauge("sessions_stored", "sessions.stored", "Stored sessions."),
    _gauge("sessions_active", "sessions.active", "Sessions with a running request."),
    _gauge("sessions_tokens", "sessions.tokens", "Tokens in the histories of all sessions."),
    _gauge("sessions_not_durable", "sessions.not_durable", "Sessions with turns that are in memory only."),
    _gauge("embedding_requests", "embeddings.requests", "Requests for embeddings that are not answered yet."),
    _counter("embedded_texts", "embeddings.texts_total", "Texts that were embedded."),
    _counter("embedded_tokens", "embeddings.tokens_total", "Tokens of texts that were embedded."),
    _gauge("embedding_bytes", "embeddings.bytes", "Memory of the context for embeddings."),
    _counter("constraints_compiled", "constraints.compiled_total", "Constraints that were checked and compiled."),
    _counter("constraints_reused", "constraints.reused_total", "Constraints that another request had before."),
    _counter("constraints_refused", "constraints.refused_total", "Constraints that were refused."),
)


def _of_principal(name: str, field: str, help: str, kind: Kind = "counter") -> Exported:
    return Exported(f"uma_principal_{name}", "principals", help, kind, label="principal", inner=field)


PRINCIPALS: Final = (
    _of_principal("requests_total", "requests_total", "Ended answers by principal."),
    _of_principal("tokens_total", "tokens_total", "Generated tokens by principal."),
    _of_principal("prompt_tokens_total", "prompt_tokens_total", "Computed prompt tokens by principal."),
    _of_principal("cached_tokens_total", "cached_tokens_total", "Cached prompt tokens by principal."),
    _of_principal("requests_running", "running", "Requests in prefill or decode by principal.", "gauge"),
)


def _of_device(name: str, field: str, help: str) -> Exported:
    return Exported(f"uma_device_{name}", "devices", help, "gauge", label="device", inner=field)


DEVICES: Final = (
    _of_device("weights_bytes", "weights_bytes", "Weights of the model by device, mapped ones included."),
    _of_device("kv_cache_bytes", "kv_cache_bytes", "KV cache and recurrent states of the model by device."),
    _of_device("compute_bytes", "compute_bytes", "Buffers for activations and logits by device."),
    _of_device("free_bytes", "free_bytes", "Memory of the device that was free when the model had been loaded."),
    _of_device("memory_bytes", "total_bytes", "Memory of the device."),
)


def _of_models(name: str, field: str, help: str, kind: Kind = "counter") -> Exported:
    return Exported(f"uma_model_{name}", "models", help, kind, label="model", inner=field, of_model=False)


MODELS: Final = (
    _of_models("memory_bytes", "memory_bytes", "Size of weights and KV cache; 0 while it is not loaded.", "gauge"),
    _of_models("requests_waiting", "waiting", "Requests that wait for the model to be loaded.", "gauge"),
    _of_models("loads_total", "loads_total", "Times that the model was loaded."),
    _of_models("load_failures_total", "load_failures_total", "Loads that failed."),
    _of_models("unloads_total", "unloads_total", "Times that the model was unloaded."),
    _of_models("evictions_total", "evictions_total", "Times that the model was unloaded to make room for another."),
)

EXPORTED: Final = (*MODELS, *LOAD, *THROUGHPUT, *LATENCY, *TICKS, *MEMORY, *PARTS, *PRINCIPALS, *DEVICES)
