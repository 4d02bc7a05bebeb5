"""Tenants of a real gateway: keys, limits, quotas over restarts and kills, shares over HTTP and the socket together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import attrs
import httpx
import openai
import pytest
from click.testing import CliRunner

from tests.gateway.conftest import Gateway, Raw
from tests.support.real_daemon import LONG_CTX, missing, real_daemon
from uma_trio.cli import main
from uma_trio.gateway.application import NO_KEYS
from uma_trio.gateway.usage import read_usage

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = "/v1/chat/completions"
SHORT = {"messages": QUESTION, "max_tokens": 8}


def keys(*args: object) -> str:
    result = CliRunner().invoke(main, ["keys", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


@attrs.frozen
class Tenants:
    """A gateway that needs keys."""

    gateway: Gateway
    file: Path

    def create(self, name: str, *limits: object) -> str:
        return keys("create", name, "--file", self.file, *limits)

    def client(self, key: str | None, **headers: str) -> httpx.Client:
        given = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.gateway.http(headers={**given, **headers})

    def post(self, key: str | None, body: Any = SHORT, path: str = CHAT, **headers: str) -> httpx.Response:
        with self.client(key, **headers) as client:
            return client.post(path, json=body)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys("create", "first", "--file", file)
    with real_daemon("--parallel", "4", *LONG_CTX, "--http", "0", "--http-keys", str(file)) as daemon:
        yield Tenants(Gateway.of(daemon), file)


def code_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    found: str = error.get("uma_code") or error["code"]
    return found


# -- keys --


def test_a_key_is_needed_and_a_wrong_one_is_refused(tenants: Tenants) -> None:
    for key in (None, "none", "uma-00000000-" + "A" * 43):
        answer = tenants.post(key)
        assert (answer.status_code, code_of(answer)) == (401, "E_GATEWAY_KEY")
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    assert tenants.post(tenants.create("alice")).status_code == 200
    assert NO_KEYS not in tenants.gateway.daemon.events_logged()


def test_both_headers_carry_a_key(tenants: Tenants) -> None:
    key = tenants.create("alice")
    assert tenants.post(None, **{"x-api-key": key}).status_code == 200
    assert tenants.post("for-another-service", **{"x-api-key": key}).status_code == 200
    with tenants.client(None, authorization=f"bearer  {key}") as client:
        assert client.post(CHAT, json=SHORT).status_code == 200
    assert tenants.post(None, authorization=f"Basic {key}").status_code == 401


def test_openais_client_with_a_right_and_a_wrong_key(tenants: Tenants) -> None:
    url = f"{tenants.gateway.url}/v1"
    with openai.OpenAI(base_url=url, api_key=tenants.create("alice"), max_retries=0) as right:
        assert right.chat.completions.create(model="embedded", messages=QUESTION).choices
    with (
        openai.OpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError, match="not valid"),
    ):
        wrong.chat.completions.create(model="embedded", messages=QUESTION)


def test_a_refusal_has_the_form_that_clients_of_the_path_know(tenants: Tenants) -> None:
    body = tenants.post("wrong", path="/v1/messages").json()
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    assert isinstance(tenants.post("wrong", path="/api/chat").json()["error"], str)
    assert tenants.post("wrong", path="/v1/generate").json()["error"]["code"] == "E_GATEWAY_KEY"


def test_anthropics_client_with_a_right_and_a_wrong_key(tenants: Tenants) -> None:
    def create(key: str) -> anthropic.types.Message:
        with anthropic.Anthropic(base_url=tenants.gateway.url, api_key=key, max_retries=0) as client:
            return client.messages.create(model="embedded", messages=QUESTION, max_tokens=8)  # type: ignore[arg-type]

    assert create(tenants.create("alice")).content
    with pytest.raises(anthropic.AuthenticationError, match="not valid"):
        create("sk-ant-wrong")


def test_a_revoked_key_ends_at_once_and_an_answer_that_has_begun_goes_on(tenants: Tenants) -> None:
    key = tenants.create("leaver")
    with tenants.client(key) as client:
        body = {"messages": QUESTION, "stream": True, "max_tokens": 200, "ignore_eos": True}
        with client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            keys("revoke", "leaver", "--file", tenants.file)
            assert tenants.post(key).status_code == 401
            assert "data: [DONE]" in list(lines)
        assert client.post(CHAT, json=SHORT).status_code == 401


def test_health_needs_no_key(tenants: Tenants) -> None:
    with tenants.client(None) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/healthz", headers={"authorization": "Bearer wrong"}).status_code == 200
        for path in (b"/healthz/", b"//healthz", b"/healthz/../v1/models", b"/nothing", b"/%68ealthz2"):
            url = client.base_url.copy_with(raw_path=path)  # httpx takes the path // for a host
            assert client.get(url).status_code == 401, path


def test_floods_of_wrong_keys_get_a_wait_and_right_ones_pass(tenants: Tenants) -> None:
    key = tenants.create("alice")
    with tenants.client("wrong") as client:
        answers = [client.post(CHAT, json=SHORT) for _ in range(30)]
    assert {answer.status_code for answer in answers} == {401, 429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
    assert tenants.post(key).status_code == 200


def test_sessions_of_tenants_are_separate(tenants: Tenants) -> None:
    one, other = tenants.create("one"), tenants.create("other")
    body = {**SHORT, "session_id": "s", "stream": False}
    for key in (one, other):
        assert tenants.post(key, body, "/v1/generate").json()["session"]["turns"] == 1
    closed = tenants.post(one, {"session_id": "s"}, "/v1/session/close")
    assert closed.json()["closed"] is True
    assert tenants.post(one, {"session_id": "s"}, "/v1/session/close").status_code == 404
    assert tenants.post(other, body, "/v1/generate").json()["session"]["turns"] == 2
    spoofed = {**body, "session_id": "t", "principal": "tenant:other"}
    assert "principal" in tenants.post(one, spoofed, "/v1/generate").json()["warnings"][0]
    assert tenants.post(other, {"session_id": "t"}, "/v1/session/close").status_code == 404


def test_an_answer_without_max_tokens_ends_with_the_quota(tenants: Tenants) -> None:
    key = tenants.create("small", "--quota", "200/month")
    endless = {"messages": QUESTION, "ignore_eos": True, "stream": False}
    answer = tenants.post(key, endless, "/v1/generate").json()
    assert answer["reason"] == "length"
    assert used(tenants.gateway, "small") <= 210
    assert code_of(tenants.post(key, endless, "/v1/generate")) == "E_GATEWAY_QUOTA"


# -- limits --


def test_requests_a_minute(tenants: Tenants) -> None:
    key = tenants.create("hasty", "--rpm", 2)
    answers = [tenants.post(key) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[2].headers["x-ratelimit-limit-requests"] == "2"
    assert code_of(answers[2]) == "E_GATEWAY_RATE"
    assert "; try again in " in answers[2].text
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert 0 < int(answers[2].headers["retry-after-ms"]) <= 30_000
    assert tenants.post(tenants.create("patient", "--rpm", 2)).status_code == 200


def test_openais_client_that_waits_as_it_should_is_served(tenants: Tenants) -> None:
    key = tenants.create("waiter", "--rpm", 60)
    with tenants.client(key) as plain:
        while plain.post(CHAT, json={**SHORT, "model": "none"}).status_code == 404:
            """Until the minute is used up; from then on one request a second is admitted."""
    statuses: list[int] = []
    with openai.OpenAI(base_url=f"{tenants.gateway.url}/v1", api_key=key, max_retries=1, timeout=60) as client:
        client._client.event_hooks["response"].append(lambda answer: statuses.append(answer.status_code))
        for _ in range(3):
            assert client.chat.completions.create(model="embedded", messages=QUESTION, max_tokens=8).choices
    assert statuses.count(200) == 3


def test_an_answer_costs_its_usage_and_a_refusal_nothing(tenants: Tenants) -> None:
    key = tenants.create("talker", "--quota", "100000/month")
    assert used(tenants.gateway, "talker") == 0
    whole = tenants.post(key, {"messages": QUESTION}).json()["usage"]["total_tokens"]
    assert used(tenants.gateway, "talker") == whole
    streamed = tenants.post(key, {"messages": QUESTION, "stream": True})
    assert "[DONE]" in streamed.text
    assert used(tenants.gateway, "talker") == 2 * whole
    assert tenants.post(key, {"messages": QUESTION, "model": "none"}).status_code == 404
    assert used(tenants.gateway, "talker") == 2 * whole


def test_a_max_tokens_that_clients_of_anthropic_must_send_is_no_estimate(tenants: Tenants) -> None:
    key = tenants.create("coder", "--quota", "5000/month")
    found = tenants.post(key, {"messages": QUESTION, "max_tokens": 100_000}, "/v1/messages")
    assert found.status_code == 200
    assert used(tenants.gateway, "coder") < 100


def leave_after_ten_tokens(gateway: Gateway, key: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    before = gateway.daemon.settled()["tokens_total"]
    with Raw(gateway) as raw:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        raw.send(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
        gateway.daemon.wait_until(lambda found: found["tokens_total"] > before + 10, "ten tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_client_leaves_is_charged(tenants: Tenants, stream: bool) -> None:
    name = f"leaver-{stream}"
    key = tenants.create(name, "--quota", "100000/month")
    body = {"messages": QUESTION, "stream": stream, "max_tokens": 4000, "ignore_eos": True}
    with tenants.client(key) as client:
        if stream:
            with client.stream("POST", CHAT, json=body) as answer:
                next(answer.iter_lines())
        else:
            leave_after_ten_tokens(tenants.gateway, key, body)
    daemon = tenants.gateway.daemon
    daemon.settled()
    daemon.wait_until(lambda _: 10 <= used(tenants.gateway, name) <= 4100, "it is charged")


def usage_file(gateway: Gateway) -> Path:
    return gateway.daemon.socket.parent / "state-home" / "uma-trio" / "usage.sqlite"


def used(gateway: Gateway, name: str) -> int:
    """Tokens of the tenant on disk."""
    return sum([tokens for (tenant, _), tokens in read_usage(usage_file(gateway)).items() if tenant == name])


def test_an_answer_whose_client_has_left_costs_what_it_takes(tenants: Tenants) -> None:
    key = tenants.create("leaving", "--quota", "100000/month")
    body = {"session_id": "left", "messages": QUESTION, "max_tokens": 2000}
    with tenants.client(key) as client, client.stream("POST", "/v1/session/answer", json=body) as answer:
        next(line for line in answer.iter_lines() if line.startswith("event: token"))
        assert used(tenants.gateway, "leaving") > 2000
    tenants.gateway.daemon.wait_until(lambda _: used(tenants.gateway, "leaving") < 200, "it is charged at its end")
    assert used(tenants.gateway, "leaving") > 8


def test_answers_in_flight_are_counted_over_http_and_the_socket_together(tenants: Tenants) -> None:
    key = tenants.create("busy", "--max-requests", 2)
    daemon = tenants.gateway.daemon
    endless = {"messages": QUESTION, "max_tokens": 8000, "ignore_eos": True, "principal": "tenant:busy"}
    with daemon.wire() as one, daemon.wire() as other:
        for wire in (one, other):
            wire.send(id="r", **endless)
            assert wire.receive()["event"] == "token"  # type: ignore[index]
        answer = tenants.post(key)
        assert (answer.status_code, code_of(answer)) == (429, "E_LIMIT_REQUESTS")
        other.sock.close()
        daemon.wait_until(lambda found: found["running"] == 1, "one answer less")
        assert tenants.post(key).status_code == 200
    daemon.settled()


# -- SIGHUP --


def test_sighup_reads_keys_and_quotas_again_and_streams_go_on(tenants: Tenants) -> None:
    daemon = tenants.gateway.daemon
    key = tenants.create("reader", "--quota", "300/month")
    with tenants.client(key) as client:
        body = {"messages": QUESTION, "stream": True, "max_tokens": 150, "ignore_eos": True}
        with client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert code_of(tenants.post(key, {**SHORT, "max_tokens": 250}, "/v1/generate")) == "E_GATEWAY_QUOTA"
            with contextlib.closing(sqlite3.connect(usage_file(tenants.gateway))) as connection, connection:
                connection.execute("UPDATE usage SET tokens = 0 WHERE tenant = 'reader'")
            before = daemon.logs().count("tenants from")
            daemon.signal(signal.SIGHUP)
            daemon.wait_until(lambda _: daemon.logs().count("tenants from") > before, "the keys are read again")
            assert tenants.post(key, {**SHORT, "stream": False, "max_tokens": 250}, "/v1/generate").status_code == 200
            assert [*lines][-2] == "data: [DONE]"


# -- quotas and the end of processes --


@pytest.mark.thorough
def test_a_quota_holds_over_a_killed_gateway_and_a_killed_daemon(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    file = tmp_path / "keys.yaml"
    key = keys("create", "alice", "--quota", "120/month", "--file", file)
    flags = ("--http", "0", "--http-keys", str(file))

    def spent(gateway: Gateway) -> None:
        for _ in range(2):
            answer = Tenants(gateway, file).post(key)
            assert (answer.status_code, code_of(answer)) == (429, "E_GATEWAY_QUOTA")
            assert int(answer.headers["retry-after"]) > 1

    with real_daemon(*flags, folder=tmp_path) as daemon:
        gateway = Gateway.of(daemon)
        first = Tenants(gateway, file)
        total = 0
        while (answer := first.post(key)).status_code == 200:
            total += answer.json()["usage"]["total_tokens"]
        assert 60 < total == used(gateway, "alice") <= 120
        spent(gateway)
        os.kill(daemon.metrics()["gateway"]["pid"], signal.SIGKILL)
        daemon.wait_until(lambda found: found["gateway"]["restarts_total"] == 1, "a new gateway")
        spent(gateway)
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    (tmp_path / "log").unlink()
    with real_daemon(*flags, folder=tmp_path) as daemon:
        spent(Gateway.of(daemon))


def test_what_an_answer_may_use_is_charged_before_it_begins(tmp_path: Path) -> None:
    """So a gateway that is killed again and again gives nothing away."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    file = tmp_path / "keys.yaml"
    key = keys("create", "alice", "--quota", "10000/month", "--file", file)
    with real_daemon(*LONG_CTX, "--http", "0", "--http-keys", str(file), folder=tmp_path) as daemon:
        gateway = Gateway.of(daemon)
        with Tenants(gateway, file).client(key) as client:
            body = {"messages": QUESTION, "stream": True, "max_tokens": 4000, "ignore_eos": True}
            with client.stream("POST", CHAT, json=body) as answer, pytest.raises(httpx.RemoteProtocolError):
                lines = answer.iter_lines()
                next(lines)
                os.kill(daemon.metrics()["gateway"]["pid"], signal.SIGKILL)
                list(lines)
        daemon.wait_until(lambda found: found["gateway"]["restarts_total"] == 1, "a new gateway")
        assert 4000 <= used(gateway, "alice") <= 4100


# -- shares --


@pytest.mark.thorough
def test_a_noisy_tenant_gets_its_share_over_http_and_the_socket_together(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    file = tmp_path / "keys.yaml"
    noisy, quiet = (keys("create", name, "--file", file) for name in ("noisy", "quiet"))
    flags = ("--parallel", "1", "--http", "0", "--http-keys", str(file))
    n_tokens = {"noisy": 40, "quiet": 41}  # the log names no tenant; it has answers in the order of their ends
    with real_daemon(*flags, folder=tmp_path) as daemon:
        tenants = Tenants(Gateway.of(daemon), file)

        def body(name: str) -> dict[str, Any]:
            text = f"{name} asks: tell me a story."
            return {"messages": [{"role": "user", "content": text}], "max_tokens": n_tokens[name], "ignore_eos": True}

        def over_http(name: str, key: str) -> None:
            tenants.post(key, body(name))

        def over_the_socket(name: str) -> None:
            daemon.ask(**body(name), principal=f"tenant:{name}")

        def started(n: int, work: Callable[..., None], *args: str) -> list[threading.Thread]:
            threads = [threading.Thread(target=work, args=args, daemon=True) for _ in range(n)]
            for thread in threads:
                thread.start()
            return threads

        threads = started(8, over_http, "quiet", quiet)
        threads += started(12, over_http, "noisy", noisy) + started(12, over_the_socket, "noisy")
        for thread in threads:
            thread.join(120)
    ended = [line["tokens"] for line in daemon.logged("request") if line["reason"] == "length"]
    of_quiet = [number for number, tokens in enumerate(ended) if tokens == n_tokens["quiet"]]
    between = ended[of_quiet[0] : of_quiet[-1]].count(n_tokens["noisy"])  # from when both are there
    assert len(ended) == 32
    assert 2 <= between <= 10, ended  # about as many as quiet's; with a share for each door there would be 14
