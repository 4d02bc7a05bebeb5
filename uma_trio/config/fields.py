"""The settings of the daemon: names, units, defaults, bounds and help texts, each in one place.

Every setting is a field of one of the frozen classes below.
"""
# ruff: noqa: RUF009  (``setting`` makes a field, not a value)

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from uma_trio.protocol.parameters import PARAMETERS, with_fields

KIB: Final = 1024
MIB: Final = 1024 * KIB
MB: Final = 1_000_000
"""Bytes of the unit ``_mb``."""
DEFAULT_BATCH: Final = 512
"""Tokens of a batch, where ``batch_tokens`` is 0."""
DEFAULT_TARGET_ITL_MS: Final = 200.0
"""Inter-token latency that streams are promised during prefill, in milliseconds."""


def setting(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    short: str | None = None,
    metavar: str | None = None,
    type: Any = None,
    **bounds: float,
) -> Any:
    """Declare a setting.

    Args:
        name: its name in files, variables and flags, if that is not the name of the field.
        short: a second spelling of the flag, that of llama.cpp's tools.
        metavar: what the help shows in place of the value, if the type does not say it.
        type: of the value, if no annotation says it.
        bounds: ``ge``, ``gt``, ``le`` and ``multiple_of``, as ``msgspec.Meta`` takes them.
    """
    metadata = {"help": help, "name": name, "short": short, "metavar": metavar, "bounds": bounds}
    return attrs.field(default=default, metadata=metadata, type=type)


@attrs.frozen(kw_only=True)
class Adapter:
    """A LoRA adapter of the model."""

    name: str
    """For requests."""
    path: str
    """A GGUF file, or the name of one, as for the model."""
    scale: float = 1.0
    """Scale for requests that give none."""


@attrs.frozen(kw_only=True)
class Model:
    """The model, and the memory and compute that it may use."""

    model: str | None = setting(
        None,
        "Model to serve: a GGUF file, the name of a model on this machine (uma-trio models), or one to download, such as "
        "Qwen/Qwen3-0.6B-GGUF:Q8_0. If not given, the embedded demo model is served.",
        short="-m",
    )
    alias: str | None = setting(
        None,
        "Name under which clients see the model. If not given, the name by which it was found, or the name of the file.",
        short="-a",
        metavar="NAME",
    )
    adapters: tuple[Adapter, ...] = setting(
        (),
        "LoRA adapters of the model, which requests choose by name. Each is NAME=FILE, and the flag can be repeated; in a "
        "YAML file it is a list of {name, path, scale}, where scale is that of requests that give none.",
        short="--adapter",
        metavar="NAME=FILE",
    )
    models_dir: Path | None = setting(
        None,
        "Folder of downloaded models. If not given, uma-trio/models in the platform's folder for data, such as "
        "~/.local/share.",
    )
    offline: bool = setting(False, "Download nothing. HF_HUB_OFFLINE=1 does the same.")
    draft_model: str | None = setting(
        None,
        "A smaller model with the same vocabulary, named as in model. It proposes tokens that the model verifies, where "
        "that is predicted to be faster; the text stays the same. embedded-draft is that of the embedded model.",
        short="-md",
    )
    mmproj: str | None = setting(
        None,
        "Projector of the model, with which it sees pictures: a GGUF file. If not given, the file mmproj*.gguf in the folder "
        "of the model, if exactly one fits the model; off: none.",
        short="-mm",
        metavar="FILE",
    )
    mmproj_niceness: int = setting(
        10,
        "How far the process that encodes pictures and sound gives way to others, as nice does; 0 is not at all. With "
        "less, first tokens about pictures come sooner, and streams are slower until then.",
        ge=0,
        le=19,
    )
    mmproj_offload: bool = setting(
        True,
        "Encode pictures and sound on the GPU, if the model has layers there. Otherwise on the CPU, with threads, so that the "
        "encoder takes neither memory nor time of the GPU; first tokens about pictures come later.",
    )
    chat_template: str | None = setting(
        None,
        "Chat template in place of the model's own: a Jinja file, or one of chatml, gemma, llama2, llama3, mistral, "
        "phi3.",
    )
    tool_format: Literal[
        "auto",
        "hermes",
        "mistral-args",
        "mistral",
        "deepseek-json",
        "deepseek",
        "gpt-oss",
        "gemma",
        "qwen3-coder",
        "seed-oss",
        "glm",
        "kimi",
        "minimax",
        "deepseek-v3.2",
        "deepseek-v4",
        "llama3",
    ] = setting(
        "auto",
        "How the model writes calls of tools. auto: as its chat template says, or hermes (as in Qwen) if that says nothing.",
    )
    fit: Literal["on", "off"] = setting(
        "on",
        "on: choose ctx, type_k, type_v, batch_tokens and gpu_layers, unless they are set, so that the model fits into "
        "free memory, and refuse one that does not fit before it is loaded. off: take the defaults.",
    )
    fit_reserve_mb: int = setting(
        0,
        "Memory of each device that fit leaves free. 0 leaves 6 % of what is free, at least 67 and at most 1073.",
        ge=0,
        le=100_000_000,
    )
    memory_limit_mb: int = setting(
        0,
        "Memory of each device that the model may take with fit. 0 is no limit.",
        ge=0,
        le=100_000_000,
    )
    ctx: int = setting(
        0,
        "Size of the KV cache in tokens, for all sequences together, as in llama-server. A request gets ctx / parallel of "
        "them, or with unified KV up to all (kv_unified). 0 takes 8192 for each sequence, or the model's training context "
        "if that is smaller, or what fits; with fit off at most a quarter of the machine's memory. With per-sequence KV "
        "and all layers on GPUs, fit takes up to 32768 for each, if a quarter of their free memory has room.",
        short="-c",
        ge=0,
        le=64 * MIB,
    )
    parallel: int = setting(
        8,
        "Sequences that are decoded at the same time. Further requests wait in the queue.",
        short="-np",
        ge=1,
        le=256,
    )
    threads: int = setting(
        0,
        "Compute threads. 0 takes all physical cores but one, which is left to the event loop.",
        short="-t",
        ge=0,
        le=512,
    )
    batch_tokens: int = setting(
        0,
        "Most tokens in one llama_decode call (n_batch and n_ubatch), and so in one tick. 0 takes 512; 2048 on GPUs (not "
        "Metal) with room to spare; fewer where memory is short.",
        ge=0,
        le=8192,
    )
    gpu_layers: int = setting(
        -1,
        "Layers to keep on the GPU, if the library supports one. -1 keeps as many there as fit, or all if fit is off.",
        short="-ngl",
        ge=-1,
        le=10_000,
    )
    devices: tuple[str, ...] = setting(
        (),
        "Devices to compute on, in the order of their layers, such as CUDA0,CUDA1; uma-trio doctor names them. none is "
        "the CPU alone. If not given, all GPUs, or integrated ones if there are no others.",
        short="-dev",
        metavar="NAMES",
    )
    split_mode: Literal["none", "layer", "row", "tensor"] = setting(
        "layer",
        "How several devices share the model. layer: each has some layers. tensor: each has a part of every layer, so "
        "that all compute every token; needs flash attention. row: each has some rows of large matrices, which few "
        "backends can. none: main_gpu has everything.",
        short="-sm",
    )
    tensor_split: tuple[float, ...] = setting(
        (),
        "Share of the model for each device, in the order of devices, such as 3,1. If not given, by free memory.",
        short="-ts",
        metavar="SHARES",
    )
    main_gpu: int = setting(
        0,
        "The device that has everything with split_mode none: its place in the order of devices, from 0.",
        short="-mg",
        ge=0,
        le=15,
    )
    n_cpu_moe: int = setting(
        0,
        "Keep the experts of the first layers, this many, in the machine's memory: for a mixture of experts whose other "
        "weights fit on the GPU.",
        short="-ncmoe",
        ge=0,
        le=1000,
    )
    override_tensor: tuple[str, ...] = setting(
        (),
        "Keep the weights whose names match a regular expression elsewhere: on a device of the model, or on CPU, such as "
        "ffn_.*_exps=CPU. The flag can be repeated, and the first match counts.",
        short="-ot",
        metavar="PATTERN=BUFFER",
    )
    rpc: tuple[str, ...] = setting(
        (),
        "llama.cpp's RPC servers, whose devices are used like GPUs of this machine; they are named RPC0, RPC1. "
        "Connections are neither encrypted nor protected: for trusted networks only.",
        metavar="HOST:PORT",
    )
    kv_mem_limit_mb: int = setting(
        0, "Maximum size of the KV cache. ctx is lowered to fit. 0 is no limit.", ge=0, le=100_000_000
    )
    embedding_ctx: int = setting(
        8192,
        "Longest text to embed, or query with a document to rank, in tokens, within what the model was trained with. "
        "Memory for it is allocated when a text needs it, next to the KV cache.",
        ge=32,
        le=MIB,
    )
    kv_unified: Literal["auto", "on", "off"] = setting(
        "auto",
        "on: all sequences share ctx, and one can use all of it. off: each has ctx / parallel tokens (per-sequence KV). "
        "auto: the faster one. With CUDA, ROCm, MUSA, SYCL and Vulkan that is off, except with target_itl_ms below 50, or with "
        "ctx / parallel below 8192 or the model's smaller training context (below 1024 with parallel at 16 or more and "
        "ctx set, by you or by fit). On other devices the first start measures it, with flash_attn; without a measurement "
        "it is on with a GPU and off without.",
    )
    flash_attn: Literal["auto", "on", "off"] = setting(
        "auto",
        "Flash attention. auto: the faster one, measured with kv_unified; without a measurement, off on a CPU, and "
        "llama.cpp's default elsewhere.",
    )
    reproducible: bool = setting(
        False,
        "Compute each token in the same way, whatever is computed next to it, cached, or lost in a crash ([the same "
        "text](design/engine-process.md#the-same-text)). For a CPU and quantised weights, without adapters; slower. The "
        "start checks that it holds for the model.",
    )
    layout_trial_s: float = setting(
        1.5,
        "Longest time to measure kv_unified and flash_attn at the first start with a model, or a tenth of the load time "
        "if that is longer. Later starts reuse the result. 0 measures nothing.",
        ge=0,
        le=3600,
    )
    type_k: Literal["auto", "f16", "q8_0", "q4_0"] = setting(
        "auto", "Data type of the K cache. auto: f16, or q8_0 where memory is short."
    )
    type_v: Literal["auto", "f16", "q8_0", "q4_0"] = setting("auto", "Data type of the V cache, likewise.")
    mmap: bool = setting(True, "Map the model file into memory instead of reading it.")
    llama_dir: Path | None = setting(
        None,
        "Folder with the built libllama. If not given, what build_llama.sh built, or what the wheel uma-trio-llama has.",
    )


@attrs.frozen(kw_only=True)
class Loading:
    """Which models are loaded, and when, where the daemon serves several."""

    on_demand: bool | None = setting(
        None,
        "Load any model of this machine when a request names it; nothing is downloaded. If not given, only for the user "
        "who runs the daemon, and over HTTP for requests without a key; true: also for tenants and other users; false: "
        "for nobody.",
    )
    load: Literal["start", "demand"] = setting(
        "start",
        "When the models of serve are loaded. start: with the daemon, which serves when the first one is ready. demand: by "
        "the first request that names one.",
    )
    max_loaded_models: int = setting(
        0, "Maximum number of models that are loaded at the same time. 0 is no limit.", ge=0, le=1000
    )
    models_memory_mb: int = setting(
        0,
        "Memory for the weights and KV caches of all models together. Models that no request uses are unloaded to make "
        "room. 0 takes 80 % of the machine's memory, or with a GPU of the GPU's.",
        ge=0,
        le=100_000_000,
    )
    idle_unload_s: float | None = setting(
        None,
        "Unloads a model that no request has used for this time. 0 never does. If not given, 5 minutes for models that "
        "were loaded on demand. Pinned models stay loaded.",
        ge=0,
        le=1e9,
    )
    load_wait_s: float = setting(
        600.0,
        "How long a request waits for its model to be loaded. At most max_queue requests wait for a model.",
        gt=0,
        le=86_400,
    )


@attrs.frozen(kw_only=True)
class Engine:
    """The engine, which runs llama.cpp."""

    mode: Literal["process", "thread"] = setting(
        "process",
        "process: in a child process, so that the daemon survives a crash of llama.cpp. thread: in a thread of the "
        "daemon.",
        name="engine",
    )
    hang_timeout_s: float = setting(
        30.0,
        "A step that takes this much longer than predicted means that the engine hangs: it is killed and restarted. "
        "At a start, a file of llama.cpp that takes this long to load ends the engine.",
        name="engine_hang_timeout_s",
        ge=1,
        le=3600,
    )
    restart_attempts: int = setting(
        5,
        "Restarts of the engine without any progress in between, before the model counts as unavailable.",
        name="engine_restart_attempts",
        ge=0,
        le=1000,
    )


@attrs.frozen(kw_only=True)
class Listen:
    """Where clients connect."""

    socket: Path | None = setting(
        None, "Unix socket. If not given, $XDG_RUNTIME_DIR/uma-trio/uma.sock, or /tmp/uma.sock without XDG_RUNTIME_DIR."
    )
    protocol: Literal["auto", "json", "cbor", "newline"] = setting(
        "auto", "auto tells JSON from CBOR by the first byte of a payload. newline is for debugging with nc -U."
    )
    backlog: int = setting(128, "Connections that may wait to be accepted.", ge=1, le=65535)
    kv_events: str | None = setting(
        None,
        "Publish there which prefixes the KV cache of the first model has, for routers: vLLM's KV events over ZeroMQ, "
        "such as tcp://127.0.0.1:5557. Needs the extra uma-trio[kv-events].",
        metavar="tcp://HOST:PORT",
    )
    kv_events_replay: str | None = setting(
        None, "Where subscribers of kv_events may ask for events that they have lost.", metavar="tcp://HOST:PORT"
    )
    kv_events_exposed: bool = setting(
        False,
        "Publish KV events to other machines: everybody who reaches the address may read the tokens of all prompts.",
    )


@attrs.frozen(kw_only=True)
class Http:
    """The HTTP gateway. It runs in a process of its own and is a client of the Unix socket."""

    listen: str | None = setting(
        None,
        "Serve HTTP at this address: a port, or HOST:PORT. Without a host it is 127.0.0.1. Port 0 takes a free one, which "
        "the log names.",
        name="http",
        metavar="[HOST:]PORT",
    )
    max_connections: int = setting(
        1024,
        "Maximum number of HTTP requests at a time. Twice as many connections may be open.",
        name="http_max_connections",
        ge=1,
        le=100_000,
    )
    max_body_bytes: int = setting(
        16 * MIB, "Largest body of an HTTP request.", name="http_max_body_bytes", ge=1024, le=1024 * MIB
    )
    fetch_pictures: bool = setting(
        False,
        "Fetch pictures that requests name by an https URL, from public addresses only.",
        name="http_fetch_pictures",
    )
    keep_alive_s: float = setting(
        15.0,
        "A stream that has sent nothing for this time sends a comment, so that proxies and clients keep waiting.",
        name="http_keep_alive_s",
        gt=0,
        le=3600,
    )
    idle_timeout_s: float = setting(
        75.0,
        "Closes an HTTP connection that has no request for this time.",
        name="http_idle_timeout_s",
        gt=0,
        le=86_400,
    )
    keys: Path | None = setting(
        None,
        "File of the tenants and their API keys, which uma-trio keys writes. If not given, keys.yaml in the configuration "
        "folder ($XDG_CONFIG_HOME/uma-trio), as soon as it exists. Without such a file no key is needed.",
        name="http_keys",
    )
    insecure: bool = setting(
        False,
        "Serve HTTP to other machines although there are no API keys: everybody who reaches the address may use it.",
    )
    hosts: str = setting(
        "",
        "Host names, with commas, under which clients reach the gateway, besides localhost and addresses. .example.com "
        "stands for all names that end so, * for all.",
        name="http_hosts",
        metavar="NAMES",
    )
    origins: str = setting(
        "localhost",
        "Origins, with commas, whose web pages may use the gateway (CORS), such as https://chat.example.com. localhost "
        "stands for all pages that this machine serves to its own browser, app://* for all of a scheme other than http "
        "and https, * for all. If empty, only the gateway's own pages.",
        name="http_origins",
        metavar="ORIGINS",
    )
    any_model: bool = setting(
        False,
        "Answer requests for models that are not served with the first model, as llama-server does.",
        name="http_any_model",
    )
    verbose: bool = setting(
        False,
        "Describe each request of OpenAI's API in its answer, as __verbose, with the prompt that the model got; the same "
        "as the field verbose of a request.",
        name="http_verbose",
    )
    tls_certificate: Path | None = setting(
        None, "PEM file with the certificate, and those of its issuers, to serve HTTPS. Needs tls_key."
    )
    tls_key: Path | None = setting(None, "PEM file with the private key of tls_certificate, without a password.")
    access_log: bool = setting(
        False,
        "Log one line for every HTTP request: id, session, route, status, duration, tokens.",
        name="http_access_log",
    )
    metrics_compat: Literal["none", "vllm", "llama-server"] = setting(
        "none", "vllm, llama-server: /metrics has the names that dashboards for that program use as well."
    )
    peers: str = setting(
        "",
        "URLs of the other daemons, with commas, between which sessions move, such as http://10.0.0.2:8080. The own one may "
        "be among them. Needs peers_key.",
        metavar="URLS",
    )
    peers_key: Path | None = setting(
        None,
        "File with the secret that all peers share, of 32 characters or more. Only its owner may read it.",
    )
    peer_url: str | None = setting(
        None, "What this daemon is called in --peers of the others. If not given, its address.", metavar="URL"
    )
    otlp_endpoint: str | None = setting(
        None,
        "Send a trace of every HTTP request to this OpenTelemetry collector, such as http://localhost:4318/v1/traces. "
        "Needs the extra uma-trio[otel].",
        metavar="URL",
    )


@attrs.frozen(kw_only=True)
class Limits:
    """What clients may ask for. A request beyond a limit gets an E_LIMIT_* error and is never cut silently."""

    max_connections: int = setting(
        512,
        "Maximum number of open connections. A Unix user or a tenant gets another one only if more are free than it has; "
        "the user who runs the daemon may have all.",
        ge=1,
        le=100_000,
    )
    max_queue: int = setting(256, "Maximum number of requests that wait for a sequence.", ge=0, le=1_000_000)
    max_frame_bytes: int = setting(
        16 * MIB, "Largest payload of a frame. Checked before memory is allocated for it.", ge=256, le=64 * MIB
    )
    max_prompt_bytes: int = setting(
        0,
        "Largest prompt in UTF-8 bytes, checked before it is tokenized. 0 takes 8 bytes for each token of a request's "
        "context, and at least 262144. A larger one needs a larger max_frame_bytes too.",
        ge=0,
        le=64 * MIB,
    )
    max_prompt_tokens: int = setting(1 << 20, "Largest prompt in tokens.", ge=1, le=64 * MIB)
    max_controller_bytes: int = setting(
        16 * MIB, "Largest Wasm module that may be uploaded as a controller.", ge=1024, le=128 * MIB
    )
    max_tokens: int = setting(
        1 << 20, "Largest max_tokens of a request. The context limits it as well.", ge=1, le=2**31 - 1
    )
    default_max_tokens: int = setting(
        0,
        "max_tokens of a request that gives none, or what fits into the context if that is less. 0 takes as many as "
        "the request's share of ctx has room for, which is ctx / parallel.",
        ge=0,
        le=2**31 - 1,
    )
    max_tx_bytes: int = setting(
        256 * KIB,
        "Bytes that may wait for a client that does not read. Then its streams pause, and no others.",
        ge=4 * KIB,
        le=1024 * MIB,
    )
    idle_timeout_s: float = setting(
        300.0, "Closes a connection without a running request that sends nothing for this time.", gt=0, le=1e6
    )
    frame_timeout_s: float = setting(
        30.0, "Closes a connection if the rest of a frame does not arrive in this time.", gt=0, le=1e6
    )
    request_timeout_s: float = setting(
        3600.0, "Ends a request that takes longer than this, including the time in the queue.", gt=0, le=1e7
    )
    write_timeout_s: float = setting(
        60.0, "Closes a connection that has data to read and reads nothing for this time.", gt=0, le=1e6
    )
    drain_notice_s: float = setting(
        0.0,
        "How long /health is 503 after SIGTERM before new requests are refused, so that routers stop sending them. Only "
        "with http.",
        ge=0,
        le=3600,
    )
    drain_hand_over_s: float = setting(
        10.0,
        "How long sessions are offered to peers after SIGTERM, while new requests are refused; moves that are under way "
        "may end. Only with peers.",
        ge=0,
        le=3600,
    )
    drain_timeout_s: float = setting(
        30.0, "How long running requests may go on after SIGTERM before they are cancelled.", ge=0, le=1e6
    )


@attrs.frozen(kw_only=True)
class Scheduling:
    """How the scheduler fills ticks."""

    target_itl_ms: float = setting(
        DEFAULT_TARGET_ITL_MS,
        "Target for the time between the tokens of a stream during prefill, for requests without slo.target_itl_ms. "
        "Prefill gets the time that decoding leaves, as far as longer chunks make it faster; on a GPU that is mostly a "
        "quarter of this.",
        gt=0,
        le=600_000,
    )
    background_itl_ms: float = setting(
        1000.0,
        "Like target_itl_ms, for requests with slo.priority background and requests without streaming.",
        gt=0,
        le=600_000,
    )
    background_share: float = setting(
        0.02,
        "How much slower requests of class background may make all others: 0.02 is 2 %. They have what the others leave, "
        "and with this share they end even on a server that is never idle. More makes batches faster there.",
        gt=0,
        le=1,
    )
    target_ttft_ms: float = setting(
        2000.0,
        "Target for the time to the first token, for requests without slo.target_ttft_ms. Among the prompts of one "
        "principal and priority, the one with the earliest deadline goes first, or a shorter one that is due little "
        "later. Late prompts with at most a batch of tokens left get more time, and may slow down streams to a third of "
        "their speed.",
        gt=0,
        le=3_600_000,
    )
    preempted_max_mb: int = setting(
        2048,
        "Memory for copies of the KV cache of streams that lost their places to requests of others. One copy takes at "
        "most half of the free memory. Without a copy, a stream is prefilled again when it goes on. 0: no copies.",
        ge=0,
        le=100_000_000,
    )
    prefill_tick_ms: float = setting(
        250.0,
        "Longest prefill tick while no stream waits for a token. A new request or a cancel may have to wait this long.",
        gt=0,
        le=600_000,
    )
    min_chunk_tokens: int = setting(
        16,
        "Smallest prefill chunk in tokens. If the target of a stream leaves less room, every other tick takes such a "
        "chunk anyway: prompts make progress, and streams miss their target.",
        ge=1,
        le=8192,
    )
    prefill_burst_tokens: int = setting(
        64,
        "Prefill tokens of one principal before it is the turn of the next one. A prompt with no more tokens left goes "
        "before longer ones.",
        ge=1,
        le=8192,
    )
    power_limit: str | None = setting(
        None,
        "Let the device rest between ticks: 60% lets it compute in that share of the time, 40W keeps the mean power below, as "
        "far as the machine [counts energy](METRICS.md#energy). All requests get slower alike.",
        metavar="SHARE|POWER",
    )
    multi_step_ms: float = setting(
        3.0,
        "Multi-step decoding: a tick decodes as many tokens of each stream as this time has room for, if there is no "
        "prefill. A small model on a fast device gets faster. A request that comes ends such a tick after the token that "
        "is computed. 0: always one token.",
        ge=0,
        le=1000,
    )
    prefix_reuse: bool = setting(
        True,
        "Keep the KV cache of finished requests while there is room, and reuse the prefixes of finished and running "
        "requests for new ones of the same principal.",
    )
    speculation: bool = setting(
        True,
        "Speculative decoding with draft tokens from prompt lookup and from the draft model, where it is predicted to be "
        "faster; the text stays the same. The speculate field of a request overrides it.",
    )


@with_fields(PARAMETERS, lambda row: setting(None, row.help, type=row.type | None, short=row.short, **row.bounds))
@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling parameters of requests that give none. Without a setting, the model file decides, or what is built in."""

    seed: int | None = setting(
        None, "Seed of the random numbers. Without it, each request gets a random one.", ge=0, le=2**32 - 1
    )


@attrs.frozen(kw_only=True)
class Sessions:
    """Conversations that the daemon remembers by their ``session_id``."""

    state_dir: Path | None = setting(
        None,
        "Folder for data that outlives the daemon. A second daemon in the same folder has its sessions in memory only. If "
        "not given, $XDG_STATE_HOME/uma-trio.",
    )
    max_stored_sessions: int = setting(
        10_000,
        "Maximum number of sessions of a model. Beyond it, the least recently used one of the principal with the most is closed.",
        ge=1,
        le=1_000_000,
    )
    session_ttl_s: float = setting(30 * 86_400.0, "Closes a session that is not used for this time.", gt=0, le=1e9)
    max_detached: int = setting(
        1000,
        "Maximum number of detached requests of a principal whose answers have not ended.",
        ge=0,
        le=1_000_000,
    )
    detached_max_mb: int = setting(
        256,
        "Maximum size of the detached answers of a principal. Beyond it, the oldest ended ones are removed. They also "
        "expire after session_ttl_s.",
        ge=1,
        le=1_000_000,
    )
    max_unattended: int = setting(
        16,
        "Maximum number of requests of a principal that go on although their clients have left: those of the chat page, "
        "and streams that can be resumed. Beyond it, those whose clients left first are cancelled.",
        ge=0,
        le=1_000_000,
    )
    unattended_s: float = setting(
        1800.0, "How long such a request goes on without a client before it is cancelled.", gt=0, le=1e9
    )
    offload: bool = setting(
        True,
        "Offload the KV cache of sessions to disk before it is evicted, and load it again where that is faster than "
        "prefill. If off, only the tokens of sessions are kept.",
    )
    offload_max_mb: int = setting(
        4096,
        "Maximum size of the KV cache on disk. Beyond it, the least recently used states are deleted.",
        ge=1,
        le=100_000_000,
    )
    pictures_max_mb: int = setting(
        1024,
        "Maximum size of the encoded pictures of a model's sessions on disk. Beyond it, the least recently used ones are "
        "deleted. 0 writes none.",
        ge=0,
        le=100_000_000,
    )
    offload_after_s: float = setting(
        30.0,
        "Offload a session that is idle for this time even if its memory is not needed, so that it survives a crash.",
        ge=0,
        le=1e9,
    )


@attrs.frozen(kw_only=True)
class Files:
    """Files that clients of the HTTP gateway upload, and the batches that are made of them."""

    max_file_mb: int = setting(200, "Largest file that may be uploaded, as in OpenAI's API.", ge=1, le=100_000)
    max_files_mb: int = setting(
        2000, "Maximum size of all files that a tenant keeps, results included.", ge=1, le=100_000_000
    )
    max_files: int = setting(
        1000, "Maximum number of files that a tenant keeps, and likewise of batches.", ge=1, le=1_000_000
    )
    file_ttl_s: float = setting(
        30 * 86_400.0, "Deletes a file this time after it was made, if its client says nothing else.", ge=60, le=1e9
    )


@attrs.frozen(kw_only=True)
class Aici:
    """Wasm controllers, which decide about every token. They run in a process of their own: the AICI runtime."""

    enabled: Literal["enabled", "disabled"] = setting(
        "enabled",
        "Whether requests may have controllers. The runtime is started when the first request has one.",
        name="aici",
    )
    executable: Path | None = setting(
        None,
        "Another runtime that speaks the protocol of Microsoft's aicirt, in the version that docs/AICI.md names. It gets "
        "the same flags. If not given, uma-trio aicirt.",
        name="aici_executable",
    )
    tokenizer: str | None = setting(
        None,
        "What the runtime's flag --tokenizer gets, for a runtime that does not take GGUF files.",
        name="aici_tokenizer",
        metavar="NAME",
    )
    futex: bool = setting(
        False,
        "Wait on futexes instead of semaphores for messages of the runtime. Linux only.",
        name="aici_futex",
    )
    step_ms: int = setting(
        150,
        "Longest time of a controller for a callback in a step. If it takes 0.2 s longer, its answer ends.",
        name="aici_step_ms",
        ge=1,
        le=600_000,
    )
    skip_ms: int = setting(
        20,
        "A controller that takes longer than this is left out of the step and goes on in the next one, so that others do "
        "not wait. Only with uma-trio's own runtime. 0 never skips one.",
        name="aici_skip_ms",
        ge=0,
        le=600_000,
    )
    init_ms: int = setting(
        1000, "Longest time to start the controller of a request.", name="aici_init_ms", ge=1, le=600_000
    )
    max_memory_mb: int = setting(
        64, "Memory that one controller may use, in MiB.", name="aici_max_memory_mb", ge=1, le=4096
    )
    max_forks: int = setting(
        16,
        "Sequences that one request may be forked into. parallel is a limit as well.",
        name="aici_max_forks",
        ge=1,
        le=256,
    )
    max_modules_mb: int = setting(
        1024,
        "Modules on disk with their machine code, in MiB. To make room, the least recently used modules without a tag are "
        "removed, first those of the principal who uploads. Only with uma-trio's own runtime.",
        name="aici_max_modules_mb",
        ge=16,
        le=1_000_000,
    )
    max_principal_modules_mb: int = setting(
        256,
        "Modules on disk of one principal who is not an administrator, in MiB. Only with uma-trio's own runtime.",
        name="aici_max_principal_modules_mb",
        ge=1,
        le=1_000_000,
    )


@attrs.frozen(kw_only=True)
class Operations:
    """Logs, metrics, the perf log, and when the daemon ends."""

    log_format: Literal["auto", "human", "json"] = setting(
        "auto", "Format of the log. auto is human on a terminal and JSON lines otherwise."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Lowest level that is logged.")
    debug: bool = setting(False, "Log one line for every tick. Costs throughput.")
    snapshot_dir: Path | None = setting(
        None, "Folder for the metrics snapshots that SIGUSR1 writes. If not given, the folder of the socket."
    )
    perf_log: Path | None = setting(
        None, "File for a record of every tick and every request. uma-trio perf report evaluates it."
    )
    perf_log_replay: Literal["off", "hashes", "prompts"] = setting(
        "off",
        "What the perf log says of each answer for [uma-trio replay](PERF_LOG.md#replay): hashes of prompt and answer "
        "with all that decided the tokens; or also the tokens, so everything that users asked.",
    )
    perf_log_mb: int = setting(
        256,
        "Maximum size of the perf log on disk. At half of this the file becomes NAME.1, in place of the previous one, and "
        "a new file is started.",
        ge=1,
        le=1_000_000,
    )
    stop_when_unlocked: Path | None = setting(
        None,
        "File that other processes lock with flock. When none has it locked any more, the daemon ends as with SIGTERM, "
        "unless the word keep is in it. uma-trio run starts daemons so.",
    )


ModelClass = Literal["pinned", "normal"]


@attrs.frozen(kw_only=True)
class ModelEntry:
    """One of several models that the daemon serves."""

    model: str
    """As the setting ``model``."""
    name: str | None = None
    """Under which clients see it; ``None``: as the setting ``alias``."""
    alias: tuple[str, ...] = ()
    """Further names."""
    model_class: ModelClass = "normal"
    """``pinned``: it is never unloaded to make room."""
    load: Literal["start", "demand"] = "start"
    """When it is loaded: with the daemon, or by the first request."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """Settings that it does not share with the others, by their names."""


@attrs.frozen(kw_only=True)
class Config:
    """All settings, by section."""

    model: Model = attrs.field(factory=Model)
    loading: Loading = attrs.field(factory=Loading)
    engine: Engine = attrs.field(factory=Engine)
    listen: Listen = attrs.field(factory=Listen)
    http: Http = attrs.field(factory=Http)
    limits: Limits = attrs.field(factory=Limits)
    scheduling: Scheduling = attrs.field(factory=Scheduling)
    sampling: Sampling = attrs.field(factory=Sampling)
    sessions: Sessions = attrs.field(factory=Sessions)
    files: Files = attrs.field(factory=Files)
    aici: Aici = attrs.field(factory=Aici)
    operations: Operations = attrs.field(factory=Operations)
    models: tuple[ModelEntry, ...] = ()
    """The models of the file's list ``models:``, or of several flags ``--model``; empty: ``model`` is the only one."""

    @property
    def min_batch(self) -> int:
        """Tokens that a batch must have at least: one of each sequence, and some of a prompt."""
        return self.model.parallel + max(self.scheduling.prefill_burst_tokens, self.scheduling.min_chunk_tokens)


SECTIONS: Final[Mapping[str, type]] = {
    name: cls for name, cls in typing.get_type_hints(Config).items() if attrs.has(cls)
}
