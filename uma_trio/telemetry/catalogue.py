"""The table of metrics: each with its name, its unit, what it means and how Prometheus gets it.

From it follow docs/METRICS.md, the groups of ``uma-trio metrics`` and what ``GET /metrics`` exports.  A metric is counted
elsewhere and described here, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import attrs

Kind = Literal["counter", "gauge", "histogram"]
Window = Literal["", "now", "since start", "last 4096"]

ANY: Final = ".NAME."
"""In a path: a name from outside, which Prometheus gets as a label."""

SUFFIXES: Final = {"ms": ("_ms", "_seconds"), "s": ("_s", "_seconds"), "share": ("_share", "_ratio")}
"""By unit: how names in a snapshot may end, and how those for Prometheus do."""


@attrs.frozen
class Metric:
    """A field of a snapshot."""

    path: str
    """Where it is in a snapshot: ``kv.cells``, ``models.NAME.waiting``."""
    unit: str
    window: Window
    """Which measurements it covers; empty for what never changes."""
    meaning: str
    """For docs/METRICS.md, in Markdown.  The first sentence stands alone: Prometheus gets it as the help text."""
    kind: Kind | None = None
    """What it is for Prometheus; ``None``: not exported."""
    name: str = ""
    """Its name for Prometheus without prefix and suffixes, where it is not made of ``path``."""
    label: str = attrs.field(default=attrs.Factory(lambda self: _label(self.path), takes_self=True))
    """The field is an object, and each of its keys is a value of this label; so is each ``NAME``."""
    of_model: bool = attrs.field(
        default=attrs.Factory(lambda self: not self.path.startswith(("models.", "gateway.")), takes_self=True)
    )
    """Belongs to a model, and has its name as a label for Prometheus; otherwise to the daemon."""

    @property
    def help(self) -> str:
        """One sentence, without Markdown."""
        return self.meaning.replace("`", "").partition(". ")[0].removesuffix(".") + "."

    @property
    def scale(self) -> float:
        """What turns the unit into that of Prometheus."""
        return 1e-3 if self.unit == "ms" else 1

    @property
    def prometheus_name(self) -> str:
        """``uma_``, the path, the unit if it is one of ``SUFFIXES``, and ``_total`` for counters."""
        field = self.path.removeprefix("histograms.").rpartition(ANY)[2].replace(".", "_")
        base = self.name or (f"{self.label}_{field}" if ANY in self.path else field)
        ours, theirs = SUFFIXES.get(self.unit, ("", ""))
        total = "_total" if self.kind == "counter" else ""
        return "uma_" + base.removesuffix("_total").removesuffix(ours) + theirs + total


def _label(path: str) -> str:
    parent, name, _ = path.rpartition(ANY)
    return parent.removesuffix("s") if name else ""


def counter(path: str, unit: str, meaning: str, window: Window = "since start", **options: Any) -> Metric:
    """A number that grows, such as of events."""
    return Metric(path, unit, window, meaning, "counter", **options)


def gauge(path: str, unit: str, meaning: str, window: Window = "now", **options: Any) -> Metric:
    """A number that goes up and down."""
    return Metric(path, unit, window, meaning, "gauge", **options)


def histogram(path: str, unit: str, meaning: str, **options: Any) -> Metric:
    """A distribution."""
    return Metric(path, unit, "since start", meaning, "histogram", **options)


def figure(path: str, unit: str, window: Window, meaning: str, **options: Any) -> Metric:
    """A figure that Prometheus computes from others, or that says little over time.  It is not exported."""
    return Metric(path, unit, window, meaning, **options)


def nested(path: str, meaning: str) -> Metric:
    """An object whose fields are metrics."""
    return Metric(path, "", "", meaning)


# A row: what it is, its name and its unit; then what it means, and what differs from the rule.
# fmt: off
GROUPS: Final[Mapping[str, tuple[Metric, ...]]] = {
    "Load": (
        figure("model", "", "", "Name of the model."),
        gauge("connections", "connections",
            "Open connections of the Unix socket. Idle ones are included.", of_model=False),
        gauge("running", "requests", "Requests in prefill or decode.", name="requests_running"),
        gauge("queue_depth", "requests",
            "Requests that wait for a sequence or for room in the KV cache. If it stays above 0, raise `parallel` or "
            "`ctx`, or the machine is too slow for the load.", name="requests_waiting"),
        gauge("prefill_backlog_tokens", "tokens",
            "Prompt tokens that are still to be computed. Of a request that waits all count, also those that the KV cache "
            "has."),
        counter("requests_total", "requests",
            "Ended answers by finish reason or error code. Reasons are `stop`, `length` and `cancelled`. A request "
            "with `n` answers counts `n` times.", label="reason"),
        counter("rejected_total", "requests",
            "Rejected requests and connections by error code. [These](PROTOCOL-REFERENCE.md#errors) are the codes.",
            label="code", of_model=False),
        counter("preemptions_total", "streams",
            "Streams that lost their places to requests that waited. Their principal held more than its share, or their "
            "clients did not read for half a second."),
        figure("pid", "process id", "now", "The daemon's."),
        figure("version", "text", "now", "The daemon's."),
        figure("state_dir", "text", "now", "The folder of its sessions and KV states."),
        gauge("uptime_s", "s", "Time since the model was loaded.", of_model=False),
        gauge("draining", "bool", "Whether the daemon is stopping and takes no new requests.", of_model=False),
    ),
    "Models": (
        nested("models", "All models that have a name, by it:"),
        figure("models.NAME.state", "", "", "`unloaded`, `loading`, `ready`, `draining` or `failed`."),
        figure("models.NAME.class", "", "", "`pinned` or `normal`."),
        gauge("models.NAME.waiting", "requests",
            "Requests that wait for the model to be loaded.", name="model_requests_waiting"),
        figure("models.NAME.in_use", "requests", "now", "Requests and queries that keep it loaded."),
        figure("models.NAME.idle_s", "s", "now",
            "Time since the last one ended; `null` while there is one, and while it is not loaded."),
        gauge("models.NAME.memory_bytes", "bytes",
            "Size of the model's weights and KV cache. `null` while it is not loaded; then 0 for Prometheus."),
        counter("models.NAME.loads_total", "loads", "Times that the model was loaded."),
        counter("models.NAME.load_failures_total", "loads", "Loads that failed. The log has the reasons."),
        counter("models.NAME.unloads_total", "loads", "Times that the model was unloaded. Reloads are included."),
        counter("models.NAME.evictions_total", "loads", "Times that the model was unloaded to make room for another."),
        figure("models.NAME.metrics", "", "",
            "All figures of a model, as those outside of `models`; absent for the one that those are about."),
    ),
    "Throughput": (
        counter("tokens_total", "tokens", "Generated tokens."),
        counter("prompt_tokens_total", "tokens",
            "Prompt tokens that were computed. Tokens from the cache are not included."),
        counter("energy_joules_total", "joules",
            "Energy that processor and cards took while they computed, as far as the machine [counts it](#energy). "
            "Other programs at that time are included.", name="energy_joules"),
        figure("joules_per_token", "joules", "since start",
            "`energy_joules_total` divided by all tokens that were computed, those of prompts included; absent if nobody counts."),
        counter("prefix_cache_hits_total", "requests", "Requests whose prompt began in the KV cache."),
        counter("cached_tokens_total", "tokens",
            "Prompt tokens that came from the KV cache. The hit rate is this, divided by the sum of this and "
            "`prompt_tokens_total`."),
        counter("draft_tokens_total", "tokens", "Draft tokens that were checked."),
        counter("accepted_draft_tokens_total", "tokens",
            "Draft tokens that were accepted. They needed no tick of their own."),
        figure("acceptance_rate", "share", "since start",
            "Accepted draft tokens divided by all draft tokens. A low rate means that answers repeat little of their "
            "context, and that the draft model knows them badly. The scheduler drafts only where it predicts a gain."),
        counter("model_draft_tokens_total", "tokens",
            "Draft tokens of the draft model that were checked. The others are from prompt lookup."),
        counter("accepted_model_draft_tokens_total", "tokens", "Draft tokens of the draft model that were accepted."),
        figure("model_acceptance_rate", "share", "since start",
            "Accepted draft tokens of the draft model divided by all of its draft tokens."),
        figure("draft_model_ms_avg", "ms", "since start",
            "Average time of the draft model, in ticks in which it computed."),
        counter("forced_tokens_total", "tokens",
            "Tokens that were the only ones a constraint allowed. They needed no tick of their own."),
        counter("late_masks_total", "samples",
            "Samples whose mask was not ready in time. The sequence got its token in a later tick. Rising: a request has "
            "a very complex constraint, or a slow controller (`controllers.skipped_total`)."),
        counter("ticks_total", "ticks", "Completed ticks: steps, however many forward passes they have."),
        counter("decode_calls_total", "calls",
            "Calls of `llama_decode`. More than `ticks_total`: several narrow calls are faster than one wide call on "
            "this machine, or llama.cpp would divide a wide one anyway (per-sequence KV)."),
        counter("run_ahead_steps_total", "ticks",
            "Ticks submitted while the previous one computed. So the device did not wait."),
        counter("mixed_ticks_total", "ticks", "Ticks with decodes and prefill."),
        counter("mixed_run_ahead_steps_total", "ticks",
            "Ticks with decodes and prefill that ran ahead. Far fewer than `mixed_ticks_total`: requests come all the "
            "time and revoke them, or their duration is predicted badly."),
        counter("interrupted_steps_total", "ticks",
            "Ticks of class `background` alone that were ended for a request of another class, and computed again. Only a "
            "CPU can end one."),
        figure("avg_batch", "sequences", "since start",
            "Mean number of sequences in a tick, prefill included. 1 means one request at a time."),
    ),
    "Latency": (
        figure("inter_token_p50_ms", "ms", "last 4096",
            "Median inter-token latency. Tokens of one tick, such as accepted draft tokens, count as one. Pauses in "
            "which the client did not read are left out."),
        figure("inter_token_p95_ms", "ms", "last 4096", "95th percentile."),
        figure("inter_token_p99_ms", "ms", "last 4096",
            "99th percentile: the pauses that people notice. Far above `inter_token_p50_ms`: prefill takes too much of "
            "each tick; lower `target_itl_ms`. Above `target_itl_ms` during prefill: the machine is too slow for this "
            "target, or `tick_prediction_error` is high."),
        figure("ttft_p50_ms", "ms", "last 4096",
            "Median time to first token, from the arrival of the request. Includes time in the queue."),
        figure("ttft_p95_ms", "ms", "last 4096",
            "95th percentile. High while `queue_depth` is 0: prefill gets too little of each tick; raise "
            "`target_itl_ms`."),
        figure("requests_inter_token_ms", "ms", "now",
            "Moving average of the inter-token latency of each running request, by request id. The latest token has a "
            "weight of one fifth.", label="id"),
        figure("cancel_to_free_p50_ms", "ms", "last 4096",
            "Median time from a cancel (event, closed socket, timeout, shutdown) until the request's cells of the KV "
            "cache could be given to others: 0 if no tick computed it."),
        figure("cancel_to_free_max_ms", "ms", "last 4096", "The longest. More than the duration of one tick is a bug."),
    ),
    "Histograms": (
        nested("histograms", "Distributions, each with `bounds`, `counts`, `count` and `sum`:"),
        histogram("histograms.ttft_ms", "ms",
            "Time from the arrival of a request to its first token.", name="time_to_first_token"),
        histogram("histograms.inter_token_ms", "ms",
            "Time between the tokens of an answer. `inter_token_p50_ms` says what counts.", name="inter_token_latency"),
        histogram("histograms.tick_ms", "ms",
            "Time that a tick spends in `llama_decode` and in sampling.", name="tick_duration"),
        histogram("histograms.batch", "sequences", "Sequences in a tick, prefill included.", name="batch_sequences"),
        histogram("histograms.request_ms", "ms",
            "Time from the arrival of a request to the end of a complete answer.", name="request_duration"),
        histogram("histograms.request_queue_ms", "ms", "Time from the arrival of a request until it had its KV cells."),
        histogram("histograms.request_prefill_ms", "ms",
            "Time from when a request got its KV cells to its first token."),
        histogram("histograms.request_decode_ms", "ms", "Time from the first token to the end of a complete answer."),
        histogram("histograms.request_prompt_tokens", "tokens",
            "Prompt tokens of a complete answer. Cached ones are included."),
        histogram("histograms.request_tokens", "tokens", "Tokens of a complete answer."),
    ),
    "Ticks": (
        figure("decode_ms_avg", "ms", "since start", "Mean time that a tick spends in `llama_decode`."),
        figure("mask_wait_ms_avg", "ms", "since start",
            "Mean time that sampling waited for the masks of constraints, in ticks with constrained requests. Masks are "
            "filled during the computation; this is what took longer."),
        figure("sample_ms_avg", "ms", "since start",
            "Mean time that a tick spends in sampling, all sequences together."),
        figure("host_gap_p50_ms", "ms", "last 4096",
            "Median time between two ticks, in which the device waits for Python. Idle time does not count."),
        figure("host_gap_p95_ms", "ms", "last 4096",
            "95th percentile. More than a few percent of `decode_ms_avg`: other processes compete for the cores."),
        gauge("host_gap_share", "share", "Time between ticks as a share of all time with work.", window="since start"),
        gauge("logits_zero_copy_share", "share",
            "Share of logits rows that were sampled where llama.cpp had left them, without a copy. Greedy rows always "
            "are.", window="since start"),
        figure("bytes_per_token", "bytes", "since start",
            "Estimated memory traffic for each token, prompt tokens included. Each call reads the weights once; each "
            "token reads the keys and values of its context."),
        gauge("memory_bandwidth_share", "share",
            "Estimated memory traffic as a share of this machine's measured bandwidth. Near 1, decoding is as fast as "
            "it can be. Above 1, the model fits into caches. Absent if the bandwidth was not measured.",
            window="since start"),
        gauge("tick_prediction_error", "share",
            "Recent error of the cost model for ticks with prefill. The mean of |predicted - measured| / measured over "
            "about the last twenty. Tokens are late by about as much during prefill. Above 0.2 for long: other "
            "processes compete for the cores, or the durations of ticks on this machine are far from linear."),
        gauge("mixed_tick_error_p50", "share",
            "Median error of the cost model for ticks with decodes and prefill. An error is |predicted - measured| / "
            "measured.", window="last 4096"),
        gauge("mixed_tick_error_p90", "share",
            "90th percentile of the error of the cost model for ticks with decodes and prefill.",
            window="last 4096"),
    ),
    "Memory": (
        nested("kv", "The KV cache:"),
        gauge("kv.sequences", "sequences", "Sequences of running requests. At most `parallel`."),
        gauge("kv.cells", "tokens",
            "Cells of the KV cache, each for one token. Their number is `ctx`, rounded as llama.cpp requires."),
        gauge("kv.cells_reserved", "tokens",
            "Cells of running requests, used or not. They have room for the prompts and all tokens that the requests "
            "may generate. Requests in the queue wait for these.", name="kv_reserved_cells"),
        gauge("kv.cells_used", "tokens",
            "Cells of running requests that hold a token. Far below `kv.cells_reserved`: clients ask for a larger "
            "`max_tokens` than they use.", name="kv_used_cells"),
        gauge("kv.cached_sequences", "sequences",
            "Sequences of ended requests, kept for prefix reuse. They are evicted when a request needs their room."),
        gauge("kv.cached_cells", "tokens",
            "Cells of ended requests, kept for prefix reuse. With `kv_unified`, at most a quarter of `kv.cells` while "
            "requests run; much less on a GPU, unless they are used again."),
        counter("kv.evicted_total", "sequences", "Cached sequences that were evicted."),
        gauge("kv.bytes", "bytes", "Size of the KV cache."),
        gauge("kv.bytes_used", "bytes",
            "Size of the cells that hold a token, of running and of ended requests. `kv.cells_used` is of running ones alone.",
            name="kv_used_bytes"),
        gauge("kv.bytes_reserved", "bytes",
            "Size of the cells of running and of ended requests. `kv.cells_reserved` is of running ones alone.",
            name="kv_reserved_bytes"),
        gauge("kv.saved_states", "states", "Session states on disk."),
        gauge("kv.saved_bytes", "bytes", "Size of the session states on disk. At most `offload_max_mb`."),
        gauge("preempted_bytes", "bytes",
            "Memory for copies of the KV cache of streams that lost their places. They wait for another place; at most "
            "`preempted_max_mb`."),
        nested("pictures", "Pictures of requests; absent if the model does not see:"),
        counter("pictures.encoded_total", "pictures", "Pictures that the encoder has encoded."),
        counter("pictures.found_total", "pictures", "Pictures that were in memory already, encoded."),
        counter("pictures.loaded_total", "pictures", "Encoded pictures that were loaded from disk."),
        gauge("pictures.kept_bytes", "bytes", "Size of the encoded pictures in memory."),
        gauge("pictures.disk_bytes", "bytes", "Size of those on disk. At most `pictures_max_mb`."),
        nested("kv_offload", "Session states on their way to disk and back; absent if `offload` is off:"),
        counter("kv_offload.saved_total", "states", "Saved session states."),
        counter("kv_offload.saved_bytes_total", "bytes", "Size of saved session states."),
        counter("kv_offload.loaded_total", "states", "Loaded session states."),
        counter("kv_offload.loaded_bytes_total", "bytes", "Size of loaded session states."),
        figure("kv_offload.loaded_tokens_total", "tokens", "since start",
            "Tokens that did not have to be computed again."),
        figure("kv_offload.skipped_total", "sequences", "since start",
            "Sequences that were not saved, because computing them again is predicted to be faster than loading them."),
        counter("kv_offload.save_failed_total", "sequences",
            "Session states that could not be saved. The disk is full, too slow, or failed; the log has the reason. "
            "The tokens are computed again when needed."),
        counter("kv_offload.load_failed_total", "states",
            "Session states that could not be loaded. They are missing, damaged, or refused by llama.cpp. Their tokens "
            "are computed again."),
        figure("kv_offload.stall_p50_ms", "ms", "last 4096",
            "Median time that a copy to or from a file added to a tick."),
        figure("kv_offload.stall_p99_ms", "ms", "last 4096", "99th percentile."),
        figure("kv_offload.stall_max_ms", "ms", "since start", "The longest."),
        figure("kv_offload.prepare_p50_ms", "ms", "last 4096",
            "Median time until the file of a state to load is ready for the engine. It verifies the state only where "
            "that is not in the page cache."),
        figure("kv_offload.load_p50_ms", "ms", "last 4096",
            "Median time that the engine takes to copy a loaded state."),
        figure("kv_offload.verify_p50_ms", "ms", "last 4096",
            "Median time that the engine waits for the threads that verify the state, besides the copy."),
        gauge("kv_offload.disk_bytes", "bytes",
            "Size of all files of session states. These count towards `offload_max_mb`: also unfinished ones, damaged "
            "ones, and those of other models or libraries."),
        nested("embeddings", "Requests for embeddings, and to rank documents:"),
        gauge("embeddings.requests", "requests",
            "Requests for embeddings that are not answered yet. Requests to rank are included.",
            name="embedding_requests"),
        counter("embeddings.texts_total", "texts",
            "Texts that were embedded. Documents that were ranked are included.", name="embedded_texts"),
        counter("embeddings.tokens_total", "tokens",
            "Tokens of texts that were embedded. Texts in progress are included.", name="embedded_tokens"),
        figure("embeddings.ms_per_token", "ms", "now", "Recent time for a token; absent before the first text."),
        gauge("embeddings.bytes", "bytes",
            "Memory of the context for embeddings. It is not part of `kv.bytes`, is created for the first text, and grows "
            "with the longest one; see `embedding_ctx`.", name="embedding_bytes"),
        gauge("send_queue_bytes", "bytes",
            "Data for clients that do not read. All connections together; each has at most about `max_tx_bytes`.",
            of_model=False),
    ),
    "Devices": (
        nested("devices", "Memory by the name of the device, as `uma-trio doctor` names it:"),
        gauge("devices.NAME.weights_bytes", "bytes",
            "Weights of the model by device, mapped ones included. The system reads mapped ones from the file when "
            "they are used."),
        gauge("devices.NAME.kv_cache_bytes", "bytes", "KV cache and recurrent states of the model by device."),
        gauge("devices.NAME.compute_bytes", "bytes", "Buffers for activations and logits by device."),
        gauge("devices.NAME.free_bytes", "bytes",
            "Memory of the device that was free when the model had been loaded. 0 where the device does not say.",
            window="since start"),
        gauge("devices.NAME.total_bytes", "bytes",
            "Memory of the device. 0 where the device does not say.", name="device_memory_bytes"),
    ),
    "Engine": (
        nested("engine", "The engine of the model:"),
        figure("engine.pid", "", "",
            "Process id. `null` with `--engine thread`, where the next two fields are absent."),
        gauge("engine.rss_bytes", "bytes",
            "Resident memory of the engine, mapped weights included.", name="engine_resident_bytes"),
        counter("engine.cpu_s", "s", "CPU time of the engine since it was last started.", window="now"),
        counter("engine.restarts_total", "restarts",
            "Restarts of the engine after a crash or a hang. More than 0: the log has the reason."),
    ),
    "Gateway": (
        nested("gateway", "The process that serves HTTP; `null` without `--http`:"),
        figure("gateway.pid", "", "", "Process id of the one that serves, not of its standby."),
        figure("gateway.rss_bytes", "bytes", "now", "Resident memory."),
        figure("gateway.cpu_s", "s", "now", "CPU time since the gateway was last started."),
        counter("gateway.restarts_total", "restarts",
            "Restarts of the gateway after its end. More than 0: the log has the reason."),
    ),
    "Controllers": (
        nested("controllers", "Controllers of requests; `null` with `--aici disabled`:"),
        gauge("controllers.sequences", "sequences", "Answers with a controller."),
        figure("controllers.post_pre_p50_ms", "ms", "last 4096",
            "Median time for all controllers to end a step and begin the next one."),
        figure("controllers.post_pre_p99_ms", "ms", "last 4096", "99th percentile."),
        figure("controllers.mid_p50_ms", "ms", "last 4096",
            "Median time until the masks of a step were there. The engine computes meanwhile; see `mask_wait_ms_avg`."),
        figure("controllers.mid_p99_ms", "ms", "last 4096", "99th percentile."),
        counter("controllers.skipped_total", "masks",
            "Masks of controllers that were not there in time. Their sequences were left out of a step; see "
            "`aici_skip_ms`."),
        figure("controllers.pid", "", "",
            "Process id of the runtime. `null` while there is none; the next two fields are then absent."),
        gauge("controllers.rss_bytes", "bytes",
            "Resident memory of the runtime of controllers.", name="controllers_resident_bytes"),
        counter("controllers.cpu_s", "s", "CPU time of the runtime since it was last started.", window="now"),
        counter("controllers.restarts_total", "restarts",
            "Restarts of the runtime of controllers. More than 0: the log has the reason."),
    ),
    "Constraints": (
        nested("constraints", "Constraints of requests, by outcome:"),
        counter("constraints.compiled_total", "constraints", "Constraints that were checked and compiled."),
        counter("constraints.reused_total", "constraints",
            "Constraints that were compiled before for another request."),
        counter("constraints.refused_total", "constraints",
            "Constraints that were refused. They are too large, too slow, or cannot be followed."),
    ),
    "Sessions": (
        nested("sessions", "Sessions of this model, of all principals:"),
        gauge("sessions.stored", "sessions", "Stored sessions. At most `max_stored_sessions`, enforced once a minute."),
        gauge("sessions.active", "sessions", "Sessions with a running request."),
        gauge("sessions.tokens", "tokens", "Tokens in the histories of all sessions."),
        gauge("sessions.not_durable", "sessions",
            "Sessions with turns that are in memory only. The state folder cannot be written; the log has the reason, and "
            "says when they are written."),
        figure("sessions.journal_failures_total", "writes", "since start", "Failed writes to the journal."),
        figure("sessions.journal_restored_total", "files", "since start",
            "Journal files that were removed or cut while the daemon ran, and that it wrote again. More than 0: "
            "another program changes the state folder."),
    ),
    "Principals": (
        nested("principals", "Counts by the name of the principal:"),
        counter("principals.NAME.requests_total", "requests", "Ended answers by principal."),
        counter("principals.NAME.tokens_total", "tokens", "Generated tokens by principal."),
        counter("principals.NAME.prompt_tokens_total", "tokens",
            "Computed prompt tokens by principal. Of requests that got a first token."),
        counter("principals.NAME.cached_tokens_total", "tokens",
            "Cached prompt tokens by principal. Of requests that got a first token."),
        gauge("principals.NAME.running", "requests",
            "Requests in prefill or decode by principal.", name="principal_requests_running"),
    ),
    "Adapters": (
        nested("adapters", "Requests by the name of the LoRA adapter that they use:"),
        gauge("adapters.NAME.running", "requests",
            "Requests in prefill or decode by LoRA adapter.", name="adapter_requests_running"),
        gauge("adapters.NAME.waiting", "requests",
            "Requests that wait for a place by LoRA adapter.", name="adapter_requests_waiting"),
    ),
    "Perf log": (
        counter("perf_log_dropped_total", "records",
            "Records that are missing in the perf log. The disk of the perf log is too slow, full, or failed (then the "
            "log has a warning). Absent without a perf log.", of_model=False),
    ),
}
"""All metrics by group.  The groups are headings of docs/METRICS.md and of ``uma-trio metrics``."""
# fmt: on

METRICS: Final[Mapping[str, Metric]] = {metric.path: metric for group in GROUPS.values() for metric in group}
"""All metrics by path."""


def find(snapshot: Mapping[str, Any], path: str) -> Any:
    """A field of a snapshot; ``None`` if the daemon has not measured it."""
    value: Any = snapshot
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def paths(snapshot: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """The paths of all fields of a snapshot, as ``METRICS`` has them; some of them more than once."""
    for key, value in snapshot.items():
        path = within + key
        yield path
        metric = METRICS.get(path)
        if not isinstance(value, Mapping) or metric is None or metric.label or metric.kind == "histogram":
            continue
        if path == "models.NAME.metrics":
            yield from paths(value)
        elif any(metric.startswith(path + ANY) for metric in METRICS):
            for inner in value.values():
                yield from paths(inner, path + ANY)
        else:
            yield from paths(value, f"{path}.")
