"""``/metrics``: what Prometheus reads from a real gateway, also without a daemon; and the access log."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import missing, real_daemon
from uma_trio.telemetry.catalogue import METRICS, paths

CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5, "ignore_eos": True}


def scraped(gateway: Gateway, **headers: str) -> dict[str, float]:
    """Samples by name and labels."""
    with gateway.http() as client:
        response = client.get("/metrics", headers=headers)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        return {
            f"{sample.name} {sorted(sample.labels.items())}" if sample.labels else sample.name: sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    """How much all samples of ``name`` together grew."""
    return sum(value - before.get(key, 0.0) for key, value in after.items() if key.split()[0] == name and value)


@pytest.fixture(scope="module")
def watched() -> Any:
    """A gateway with an access log, and with the names of vLLM."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--http", "0", "--http-access-log", "--metrics-compat", "vllm", "--idle-timeout-s", "1") as daemon:
        yield Gateway.of(daemon)


def test_requests_are_counted_by_the_gateway_and_by_the_daemon(watched: Gateway) -> None:
    before = scraped(watched)
    with watched.http() as client:
        for stream in (False, True):
            assert client.post("/v1/chat/completions", json={**CHAT, "stream": stream}).status_code == 200
        assert client.post("/v1/chat/completions", json={"messages": 1}).status_code == 400
        assert client.get("/no/such/path").status_code == 404
    after = scraped(watched)
    assert after["uma_up"] == 1
    assert grown(before, after, "uma_tokens_total") == 10
    assert grown(before, after, "vllm:generation_tokens_total") == 10
    assert grown(before, after, "uma_time_to_first_token_seconds_count") == 2
    assert grown(before, after, "uma_http_requests_total") == 5  # four, and the first scrape
    chat = [("dialect", "openai"), ("route", "/v1/chat/completions")]
    assert after[f"uma_http_requests_total {[*chat, ('status', '200')]}"] == 2
    assert after[f"uma_http_requests_total {[*chat, ('status', '400')]}"] == 1
    assert after[f"uma_http_requests_total {[('dialect', ''), ('route', 'other'), ('status', '404')]}"] == 1
    assert after[f"uma_http_request_duration_seconds_count {chat}"] == 3
    assert after["uma_http_streams_open"] == 0
    assert after["uma_http_requests_in_flight"] == 1
    assert after["process_resident_memory_bytes"] > 1e6


def test_a_real_daemon_says_what_the_catalogue_describes(watched: Gateway) -> None:
    with watched.http() as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    snapshot = {key: value for key, value in watched.daemon.metrics().items() if key not in ("event", "id")}
    found = set(paths(snapshot))
    assert found - set(METRICS) == set(), "describe these in telemetry/catalogue.py"
    not_here = ("adapters.", "controllers.", "kv_offload.", "pictures.")
    unmeasured = {path for path in set(METRICS) - found if not path.startswith(not_here)}
    assert unmeasured <= {path for path, metric in METRICS.items() if metric.kind is None or metric.unit == "share"} | {
        "perf_log_dropped_total"
    }


def test_openmetrics_for_those_who_ask(watched: Gateway) -> None:
    with watched.http() as client:
        response = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert response.text.endswith("# EOF\n")


def test_the_connection_for_metrics_is_opened_again_when_the_daemon_closed_it(watched: Gateway) -> None:
    for _ in range(2):
        assert scraped(watched)["uma_up"] == 1
        watched.daemon.wait_until(lambda found: found["connections"] == 1, "only the connection that asks")


def test_without_a_daemon_that_answers_the_gateway_says_so(watched: Gateway) -> None:
    assert scraped(watched)["uma_up"] == 1
    watched.daemon.signal(signal.SIGSTOP)
    try:
        while (found := scraped(watched))["uma_up"]:
            """A snapshot may be a tenth of a second old."""
        assert not any(name.startswith("uma_tokens") for name in found)
        assert found["uma_http_requests_in_flight"] == 1
    finally:
        watched.daemon.signal(signal.SIGCONT)
    while not scraped(watched)["uma_up"]:
        """The same."""


def test_each_request_has_a_line_in_the_log(watched: Gateway) -> None:
    with watched.http() as client:
        headers = {"x-request-id": "mine"}
        client.post("/v1/chat/completions", json=CHAT, headers=headers)
        client.post("/v1/chat/completions", json={"messages": []}, headers={"x-request-id": "bad"})

    def lines() -> dict[str, dict[str, Any]]:
        return {line["id"]: line for line in watched.daemon.log_lines() if line["event"] == "http"}

    watched.daemon.wait_until(lambda _: {"mine", "bad"} <= set(lines()), "both lines")
    line = lines()["mine"]
    assert (line["level"], line["logger"]) == ("info", "uma_trio.gateway.access")
    assert line["duration_ms"] > 0
    expected = {
        "method": "POST",
        "route": "/v1/chat/completions",
        "dialect": "openai",
        "status": 200,
        "stream": False,
        "tokens": 5,
        "reason": "length",
        "session": None,
        "code": None,
    }
    assert expected.items() <= line.items()
    assert {"status": 400, "code": "E_PROTO_BAD_REQUEST", "tokens": None}.items() <= lines()["bad"].items()


def test_no_log_line_for_a_request_by_default(gateway: Gateway) -> None:
    with gateway.http() as client:
        client.get("/healthz")
    scraped(gateway)
    assert "http" not in gateway.daemon.events_logged()
