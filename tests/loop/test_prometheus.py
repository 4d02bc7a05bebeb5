"""Metrics for Prometheus: every figure of a snapshot, under names and in units that Prometheus wants."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import uma_trio
from tests.support.serving import Serving, remembering, serving
from uma_trio.client import Client, ServerError
from uma_trio.gateway.metrics import AllMetrics, HttpMetrics
from uma_trio.gateway.metrics_compat import VLLM_HISTOGRAMS
from uma_trio.telemetry.catalogue import METRICS, paths

DOCS = Path(uma_trio.__file__).parent.parent / "docs"

Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(collector: Any) -> Samples:
    """Read the text that Prometheus would get."""
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(collector).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    [only] = [each for has, each in found[name] if labels.items() <= has.items()]
    return only


@pytest.fixture
async def snapshot(autojump_clock, tmp_path) -> dict[str, Any]:
    """What a daemon says that has served a little of everything."""
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness, harness.client() as client:
            return await _served_a_little(harness, client)


async def _served_a_little(harness: Serving, client: Client) -> dict[str, Any]:
    for n in (3, 5, 7):
        await client.complete(prompt="hello " * 40, max_tokens=n, keep_alive=True, principal="alice")
    await client.complete(
        prompt="a", max_tokens=2, constraint={"regex": "([1-4][0-9]{2} ){3}"}, keep_alive=True, session_id="s"
    )
    for fields in ({"max_tokens": 1 << 30}, {"constraint": {"regex": "["}}):
        with pytest.raises(ServerError):
            await client.complete(prompt="a", keep_alive=True, **fields)
    answer = client.generate(id="b", prompt="once", max_tokens=1000)
    await anext(answer)
    await client.cancel("b")
    async for _ in answer:
        """The daemon closes the connection after it."""
    found: dict[str, Any] = json.loads(json.dumps(harness.server.snapshot()))
    found["gateway"] = {"pid": 1, "restarts_total": 0, "rss_bytes": 1000, "cpu_s": 1.5}
    times = [f"{name}_{level}_ms" for name in ("post_pre", "mid") for level in ("p50", "p99")]
    found["controllers"] = dict.fromkeys(times, 1.5) | {"sequences": 2, "skipped_total": 1}
    found["controllers"] |= {"pid": 2, "restarts_total": 1, "rss_bytes": 1000, "cpu_s": 1.5}
    found["adapters"] = {"sql": {"running": 1, "waiting": 0}, "formal": {"running": 2, "waiting": 3}}
    found["pictures"] = dict.fromkeys(("encoded_total", "found_total", "loaded_total", "kept_bytes", "disk_bytes"), 1)
    found["engine"] |= {"rss_bytes": 1000, "cpu_s": 1.5}  # as an engine process says
    return found


async def test_a_snapshot_has_every_metric_of_the_catalogue_and_no_other(snapshot):
    found = set(paths(snapshot))
    assert found - set(METRICS) == set(), "describe these in telemetry/catalogue.py"
    assert set(METRICS) - found == {"models.NAME.metrics"}, (
        "nobody counts these; other models have metrics of their own"
    )


async def test_the_numbers_are_those_of_the_snapshot_in_seconds_and_bytes(snapshot):
    found = samples(AllMetrics(snapshot))
    model = {"model": "fake"}
    assert value(found, "uma_up") == 1
    assert value(found, "uma_daemon_info", version=uma_trio.__version__, **model) == 1
    assert value(found, "uma_tokens_total", **model) == snapshot["tokens_total"] > 0
    assert value(found, "uma_requests_total", reason="length") == 4
    assert value(found, "uma_requests_total", reason="cancelled") == 1
    assert value(found, "uma_errors_total", code="E_CONSTRAINT_INVALID") == 1
    assert value(found, "uma_constraints_refused_total") == 1
    assert value(found, "uma_controllers_sequences", **model) == 2
    assert value(found, "uma_controllers_restarts_total", **model) == 1
    assert value(found, "uma_principal_tokens_total", principal="alice") == 15
    assert value(found, "uma_device_weights_bytes", device="CPU", **model) == 7000
    assert value(found, "uma_device_memory_bytes", device="CPU", **model) == 16_000
    assert value(found, "uma_kv_used_bytes") == snapshot["kv"]["bytes_used"]
    ttft = snapshot["histograms"]["ttft_ms"]
    assert value(found, "uma_time_to_first_token_seconds_sum") == pytest.approx(ttft["sum"] / 1e3)
    assert value(found, "uma_time_to_first_token_seconds_count") == ttft["count"] == 5
    assert value(found, "uma_time_to_first_token_seconds_bucket", le="+Inf") == 5
    buckets = [(float(has["le"]), n) for has, n in found["uma_time_to_first_token_seconds_bucket"]][:-1]
    assert buckets == [(ms / 1e3, n) for ms, n in zip(ttft["bounds"], ttft["counts"], strict=True)]


@pytest.mark.parametrize("compat", ["vllm", "llama-server"])
async def test_names_are_as_prometheus_wants_them(snapshot, compat):
    for family in AllMetrics(snapshot, compat=compat).collect():
        assert family.documentation.endswith("."), family.name
        assert re.fullmatch(r"(uma_|vllm:|llamacpp:)[a-z0-9_]+", family.name)
        assert "_ms" not in family.name
        for sample in family.samples:
            if sample.name != "vllm:lora_requests_info":  # a gauge
                assert sample.name.endswith(("_total", "_bucket", "_count", "_sum", "_info")) == (
                    family.type not in ("gauge",)
                )


def test_without_a_daemon_only_its_absence_is_exported():
    assert samples(AllMetrics(None, compat="vllm")) == {"uma_up": [({}, 0.0)]}


async def test_dashboards_for_vllm_find_their_names(snapshot):
    assert not any(name.startswith("vllm:") for name in samples(AllMetrics(snapshot)))
    found = samples(AllMetrics(snapshot, compat="vllm"))
    model = {"model_name": "fake"}
    assert value(found, "vllm:prompt_tokens_total", **model) == (
        snapshot["prompt_tokens_total"] + snapshot["cached_tokens_total"]
    )
    assert value(found, "vllm:generation_tokens_total", **model) == snapshot["tokens_total"]
    assert value(found, "vllm:prefix_cache_hits_total", **model) == snapshot["cached_tokens_total"] > 0
    by_reason = {has["finished_reason"]: n for has, n in found["vllm:request_success_total"]}
    assert by_reason == {"stop": 0, "length": 4, "abort": 1}
    assert 0 <= value(found, "vllm:kv_cache_usage_perc", **model) <= 1
    [(adapters, at)] = found["vllm:lora_requests_info"]
    assert adapters == {
        **model, "max_lora": "2", "running_lora_adapters": "formal,sql", "waiting_lora_adapters": "formal"
    }  # fmt: skip
    assert at > 0
    for name in ("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc", "num_preemptions_total"):
        assert value(found, f"vllm:{name}", **model) >= 0
    for name in VLLM_HISTOGRAMS:
        assert value(found, f"vllm:{name}_bucket", le="+Inf", **model) == value(found, f"vllm:{name}_count")


async def test_dashboards_for_llama_server_find_their_names(snapshot):
    assert not any(name.startswith("llamacpp:") for name in samples(AllMetrics(snapshot)))
    found = samples(AllMetrics(snapshot, compat="llama-server"))
    embedded = snapshot["embeddings"]["tokens_total"]
    assert value(found, "llamacpp:prompt_tokens_total") == snapshot["prompt_tokens_total"] + embedded > 0
    assert value(found, "llamacpp:prompt_tokens_cached_total") == snapshot["cached_tokens_total"] > 0
    assert value(found, "llamacpp:tokens_predicted_total") == snapshot["tokens_total"] > 0
    assert value(found, "llamacpp:n_decode_total") == snapshot["decode_calls_total"] > 0
    seconds = snapshot["histograms"]["request_decode_ms"]["sum"] / 1e3
    assert value(found, "llamacpp:tokens_predicted_seconds_total") == pytest.approx(seconds)
    for name in ("prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing", "requests_deferred"):
        assert value(found, f"llamacpp:{name}") >= 0


async def test_the_dashboard_shows_only_what_is_exported(snapshot):
    exported = samples(AllMetrics(snapshot)) | samples(_used().registry)
    board = json.loads((DOCS / "grafana" / "uma-trio.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    expressions += [each["definition"] for each in board["templating"]["list"] if each["type"] == "query"]
    assert len(expressions) > 40
    for text in expressions:
        names = re.findall(r"\b(?:uma|process)_\w+", text)
        assert names, text
        assert set(names) <= set(exported), text
        for by in re.findall(r"by \(([^)]*)\)", text):
            labels = {label for name in names for has, _ in exported[name] for label in has}
            assert set(by.split(", ")) <= labels, text
        assert text.count("(") == text.count(")")


def _used() -> HttpMetrics:
    """Metrics of a gateway that has answered a request."""
    metrics = HttpMetrics()
    metrics.requests.labels("/healthz", "openai", "200").inc()
    metrics.duration.labels("/healthz", "openai").observe(0.1)
    metrics.response_start.labels("/healthz", "openai").observe(0.1)
    return metrics


async def test_each_loaded_model_has_samples_of_its_own(snapshot):
    first = value(samples(AllMetrics(snapshot)), "uma_tokens_total", model="fake")
    other = {**snapshot, "model": "b", "tokens_total": 7, "requests_total": {"stop": 1, "E_LIMIT_CONTEXT": 2}}
    snapshot["models"]["b"] = {**snapshot["models"]["fake"], "metrics": other}
    snapshot["models"]["c"] = {**snapshot["models"]["fake"], "memory_bytes": None}
    found = samples(AllMetrics(snapshot))
    assert value(found, "uma_tokens_total", model="fake") == first
    assert value(found, "uma_tokens_total", model="b") == 7
    assert value(found, "uma_time_to_first_token_seconds_count", model="b") > 0
    assert [labels for labels, _ in found["uma_uptime_seconds"]] == [{}]
    assert value(found, "uma_model_loads_total", model="c") == 1
    assert value(found, "uma_model_memory_bytes", model="c") == 0
    assert value(found, "uma_errors_total", code="E_LIMIT_CONTEXT") == 2
