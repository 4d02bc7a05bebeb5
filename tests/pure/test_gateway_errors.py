"""Errors of the gateway as the clients of each API expect them."""

from __future__ import annotations

from typing import Any

import attrs

from tests.support.cases import all_cases
from uma_trio.errors import BadRequest, all_errors
from uma_trio.gateway.dialects.openai.dialect import error_body
from uma_trio.gateway.errors import ErrorKind, HttpError, from_failure, try_again_in
from uma_trio.protocol.events import Failure


def of_openai(status: int, code: str, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = error_body(HttpError(ErrorKind(code, status), "what to do", **fields), "req-1")["error"]
    return found


@all_cases(
    ("status", "code", "expected"),
    [
        (400, "E_PROTO_BAD_REQUEST", ("invalid_request_error", "invalid_value")),
        (400, "E_LIMIT_CONTEXT", ("invalid_request_error", "context_length_exceeded")),
        (400, "E_LIMIT_PROMPT_TOO_LARGE", ("invalid_request_error", "context_length_exceeded")),
        (400, "E_CONSTRAINT_INVALID", ("invalid_request_error", "E_CONSTRAINT_INVALID")),
        (401, "E_GATEWAY_KEY", ("authentication_error", "invalid_api_key")),
        (403, "E_GATEWAY_ORIGIN", ("permission_error", "E_GATEWAY_ORIGIN")),
        (404, "E_MODEL_NOT_FOUND", ("invalid_request_error", "model_not_found")),
        (404, "E_GATEWAY_NOT_FOUND", ("invalid_request_error", "unknown_url")),
        (405, "E_GATEWAY_METHOD", ("invalid_request_error", "method_not_supported")),
        (409, "E_SESSION_BUSY", ("invalid_request_error", "E_SESSION_BUSY")),
        (429, "E_GATEWAY_KEY", ("rate_limit_error", "rate_limit_exceeded")),
        (429, "E_GATEWAY_RATE", ("rate_limit_error", "rate_limit_exceeded")),
        (429, "E_GATEWAY_QUOTA", ("insufficient_quota", "insufficient_quota")),
        (429, "E_LIMIT_QUEUE", ("rate_limit_error", "rate_limit_exceeded")),
        (500, "E_RUNTIME_INTERNAL", ("server_error", "server_error")),
        (502, "E_GATEWAY_BROKEN", ("server_error", "server_error")),
        (503, "E_GATEWAY_LOADING", ("service_unavailable_error", "server_is_overloaded")),
        (504, "E_LIMIT_REQUEST_TIMEOUT", ("server_error", "server_error")),
    ],
)
def test_types_and_codes_of_openais_api(status: int, code: str, expected: tuple[str, str]) -> None:
    found = of_openai(status, code)
    assert (found["type"], found["code"]) == expected
    assert found["uma_code"] == code


@all_cases("error", all_errors())
def test_only_what_a_client_can_retry_is_an_overload(error: Any) -> None:
    body = error_body(from_failure(Failure(code=error.code, message="x")), "r")["error"]
    assert (body["code"] in ("rate_limit_exceeded", "server_is_overloaded")) == (error.http_status in (429, 503))


@all_cases("error", all_errors())
def test_an_error_of_the_daemon_has_the_status_and_the_code_of_the_reference(error: Any) -> None:
    found = from_failure(Failure(code=error.code, message="x"))
    assert (found.status, found.code) == (error.http_status, error.code)


def test_a_refusal_of_the_daemon_names_the_field() -> None:
    event = Failure.of(BadRequest("top_p must be a number from 0 to 1, not 2", field="messages[0].role"))
    assert from_failure(event).parameter == "messages[0].role"  # the text is for people
    assert from_failure(Failure.of(BadRequest("top_p must be a number from 0 to 1, not 2"))).parameter is None


def test_a_wait_is_said_in_words() -> None:
    waits = [try_again_in(ms) for ms in (1, 1001, 119_000, 121_000, 7_200_000, 1_000_000_000)]
    words = ["1 s", "2 s", "119 s", "3 minutes", "2 hours", "12 days"]
    assert waits == [f"try again in {each}" for each in words]
    refused = from_failure(Failure(code="E_LIMIT_QUEUE", message="the queue is full", retry_after_ms=1500))
    assert refused.message == "the queue is full; try again in 2 s"


def test_clients_do_not_retry_what_takes_longer_than_a_minute() -> None:
    assert "X-Should-Retry" not in HttpError(ErrorKind("E_X", 429), "x", retry_after_ms=60_000).headers
    found = HttpError(ErrorKind("E_X", 429), "x", retry_after_ms=60_001).headers
    assert found == {"Retry-After": "61", "Retry-After-Ms": "60001", "X-Should-Retry": "false"}


def test_clients_retry_a_missed_deadline_only_if_that_can_help() -> None:
    event = Failure(code="E_LIMIT_DEADLINE", message="late", eta_ms=700)
    assert from_failure(event).headers == {"x-uma-eta-ms": "700", "X-Should-Retry": "false"}
    later = from_failure(attrs.evolve(event, retry_after_ms=400)).reword(str)
    assert later.headers == {"x-uma-eta-ms": "700", "Retry-After": "1", "Retry-After-Ms": "400"}
