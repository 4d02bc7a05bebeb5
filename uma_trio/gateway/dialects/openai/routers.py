"""What routers in front of several daemons ask: how busy this one is, what it can take, and its version.

Sources: smg's worker monitor (``/v1/loads``, as SGLang has it), vllm-router (``/get_server_info``), vLLM (``/version``).
docs/SCALE-OUT.md says what each figure means.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Final

from starlette.responses import Response

import uma_trio
from uma_trio.client import ModelDescription
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.common.shapes import Shape
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.metrics import by_model
from uma_trio.gateway.metrics_compat import Snapshot
from uma_trio.telemetry.catalogue import find

BLOCK_TOKENS: Final = 16
"""Tokens of a block, by which routers count what two prompts have in common.  The KV cache itself shares single tokens."""


class Load(Shape):
    """How busy the daemon is, all its models together.  Names and order are SGLang's."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int


class Loads(Shape):
    """The load of each of the daemon's parts, of which there is one."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]


class Version(Shape):
    """The version of the server."""

    version: str


class ServerInfo(Shape):
    """What the server can take at a time."""

    version: str
    model_path: str
    served_model_name: str
    block_size: int
    page_size: int
    max_total_num_tokens: int
    max_running_requests: int
    max_model_len: int


async def loads(call: Call) -> Response:
    """How busy the daemon is.  Never waits for the model."""
    snapshot = await call.daemon.metrics()
    load = load_of(by_model(snapshot).values(), _only_loaded(await call.daemon.models()))
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return json_response(Loads(timestamp=now, version=uma_trio.__version__, dp_rank_count=1, loads=[load]))


def load_of(snapshots: Iterable[Snapshot], models: Iterable[ModelDescription]) -> Load:
    """The load of models that are loaded.

    Args:
        snapshots: their metrics, of which those that are not loaded have few.
        models: their descriptions.
    """
    known = list(snapshots)
    running, waiting, backlog, reserved, cells, prompt, cached = (
        sum(find(snapshot, name) or 0 for snapshot in known)
        for name in (
            *("running", "queue_depth", "prefill_backlog_tokens"),
            *("kv.cells_reserved", "kv.cells", "prompt_tokens_total", "cached_tokens_total"),
        )
    )
    parallel = sum(model.parallel for model in models)
    return Load(
        dp_rank=0,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_waiting_uncached_tokens=backlog,
        num_total_reqs=running + waiting,
        num_used_tokens=reserved,
        max_total_num_tokens=cells,
        token_usage=reserved / cells if cells else 0.0,
        gen_throughput=sum(_tokens_per_s(snapshot) for snapshot in known),
        cache_hit_rate=cached / (prompt + cached) if prompt + cached else 0.0,
        utilization=running / parallel if parallel else 0.0,
        max_running_requests=parallel,
    )


def _tokens_per_s(snapshot: Snapshot) -> float:
    """What the running streams get now, by their latest inter-token latencies."""
    gaps: list[float] = [gap for gap in snapshot.get("requests_inter_token_ms", {}).values() if gap > 0]
    return sum(1e3 / gap for gap in gaps)


def _only_loaded(models: Iterable[ModelDescription]) -> list[ModelDescription]:
    return [model for model in models if model.state == "ready"]


async def version(call: Call) -> Response:
    """The version, as vLLM says it."""
    return json_response(Version(version=uma_trio.__version__))


async def server_info(call: Call) -> Response:
    """What the daemon can take: the default model, and the KV cache and places of all models that are loaded."""
    models = await call.daemon.models()
    default, loaded = models[0], _only_loaded(models)
    return json_response(
        ServerInfo(
            version=uma_trio.__version__,
            model_path=default.name,
            served_model_name=default.name,
            block_size=BLOCK_TOKENS,
            page_size=BLOCK_TOKENS,
            max_total_num_tokens=sum(model.context for model in loaded),
            max_running_requests=sum(model.parallel for model in loaded),
            max_model_len=default.context_per_request,
        )
    )


ENDPOINTS = (
    OPENAI.get("/v1/loads", loads, Loads),
    OPENAI.get("/version", version, Version, needs_key=False),
    *(OPENAI.get(path, server_info, ServerInfo) for path in ("/get_server_info", "/server_info")),
)
