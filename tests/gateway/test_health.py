"""/healthz and /readyz: what load balancers and people ask."""

from __future__ import annotations

import signal

from tests.gateway.conftest import Gateway
from uma_trio.gateway.application import ENDPOINTS
from uma_trio.gateway.openapi import template_of


def test_a_daemon_that_serves_is_ready(gateway: Gateway) -> None:
    with gateway.http() as client:
        answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["ready"] is True
    assert {check["name"] for check in answer.json()["checks"]} >= {"daemon", "model", "engine", "queue", "memory"}


def test_a_stopped_daemon_is_not_ready_and_the_gateway_is_up(gateway: Gateway) -> None:
    with gateway.http() as client:
        gateway.daemon.signal(signal.SIGSTOP)
        try:
            not_ready = client.get("/readyz")
            up = client.get("/healthz")
        finally:
            gateway.daemon.signal(signal.SIGCONT)
        assert not_ready.status_code == 503
        assert not_ready.json()["checks"] == [
            {"name": "daemon", "ok": False, "reason": "the daemon did not answer within 2 s"}
        ]
        assert up.status_code == 200
        assert client.get("/readyz").status_code == 200


def test_a_path_that_does_not_exist(gateway: Gateway) -> None:
    with gateway.http() as client:
        assert client.get("/nothing").json()["error"]["uma_code"] == "E_GATEWAY_NOT_FOUND"
        assert "models are not uploaded;" in client.post("/api/push", json={"model": "x"}).json()["error"]
        wrong_method = client.get("/v1/chat/completions")
    assert wrong_method.json()["error"]["uma_code"] == "E_GATEWAY_METHOD"
    assert wrong_method.json()["error"]["message"] == "/v1/chat/completions does not take GET; it takes POST"
    assert wrong_method.headers["allow"] == "POST"


def test_a_wrong_method_is_refused_in_the_form_of_the_paths_dialect(gateway: Gateway) -> None:
    with gateway.http() as client:
        found = client.get("/v1/requests/x/steer"), client.get("/v1/requests/x/explain")
    assert [answer.status_code for answer in found] == [405, 404]
    assert [answer.json()["error"]["code"] for answer in found] == ["E_GATEWAY_METHOD", "E_ANSWER_NOT_FOUND"]
    assert found[0].json()["error"].keys() == found[1].json()["error"].keys()


def test_the_openapi_document_has_every_endpoint(gateway: Gateway) -> None:
    with gateway.http() as client:
        document = client.get("/openapi.json").json()
    assert {(template_of(endpoint.path), endpoint.method.lower()) for endpoint in ENDPOINTS} < {
        (path, method) for path, methods in document["paths"].items() for method in methods
    }
    names = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(set(names)) == len(names)
