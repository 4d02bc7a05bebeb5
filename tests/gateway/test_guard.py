"""What a request has to pass before it is served: host, origin, size, time; attacks on each, over real sockets."""

from __future__ import annotations

import gzip
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from tests.gateway.conftest import Gateway, Raw
from tests.support.commands import run_command
from tests.support.profile import sampled
from tests.support.real_daemon import Canary, missing, real_daemon

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
MAX_BODY = 20_000


@pytest.fixture(scope="module")
def guarded() -> Iterator[Gateway]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    hosts, origins = "llm.example.com, .lan", "localhost, https://chat.example.com, app://notes, tauri://*"
    flags = ("--http-hosts", hosts, "--http-origins", origins, "--http-max-body-bytes", str(MAX_BODY))
    with real_daemon("--http", "0", *flags, "--frame-timeout-s", "1") as daemon:
        yield Gateway.of(daemon)


def post(gateway: Gateway, **headers: str) -> httpx.Response:
    with gateway.http() as client:
        return client.post(CHAT, json=QUESTION, headers=headers)


def serve(folder: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    """Run a daemon that cannot start."""
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config")}
    return run_command(["serve", "--socket", folder / "s", *flags], environment)


def code_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    found: str = error.get("uma_code") or error["code"]
    return found


# -- hosts: a page whose name was rebound to this machine sends that name --


@pytest.mark.parametrize(
    "host",
    sampled([
        *("evil.example", "evil.example:8080", "localhost.evil.example", "notlocalhost", "llm.example.com.evil.example"),
        *("evil-llm.example.com", "lan", "evillan", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "", "a b", "[::1"),
        *("1.2.3.4.5", "0x7f000001", "xn--lcalhost-b4a", "localhost\t.evil", "*", "localhost,evil.example"),
    ], 3),
)  # fmt: skip
def test_a_name_that_is_not_served(guarded: Gateway, host: str) -> None:
    answer = post(guarded, host=host)
    assert answer.status_code in (400, 403), answer.text
    if answer.status_code == 403:
        assert code_of(answer) == "E_GATEWAY_HOST"
        assert "http_hosts" in answer.text


@pytest.mark.parametrize(
    "host",
    sampled([
        *("localhost", "LOCALHOST:1234", "localhost.", "api.localhost", "127.0.0.1", "127.1.2.3:80", "[::1]:8080"),
        *("192.168.7.7:8080", "[fe80::1]", "llm.example.com", "LLM.example.com:443", "gpu.lan", "a.b.lan:80"),
    ], 3),
)  # fmt: skip
def test_a_name_that_is_served(guarded: Gateway, host: str) -> None:
    assert post(guarded, host=host).status_code == 200


def test_two_hosts_or_none(guarded: Gateway) -> None:
    for hosts in (b"", b"host: localhost\r\nhost: evil.example\r\n", b"host: localhost\r\nhost: localhost\r\n"):
        with Raw(guarded) as raw:
            raw.send(b"GET /healthz HTTP/1.1\r\n" + hosts + b"connection: close\r\n\r\n")
            assert raw.status() in (400, 403)


# -- origins --


@pytest.mark.parametrize(
    "origin",
    sampled([
        *("https://evil.example", "null", "", "https://chat.example.com.evil.example", "file://", "localhost", "tauri"),
        *("http://chat.example.com", "https://chat.example.com:444", "https://evil.example/https://chat.example.com"),
        *("http://localhost.evil.example", "http://127.0.0.1.evil.example", "http://notlocalhost:3000", "http://192.168.1.9"),
        *("http://evil.example:80@localhost", "http://localhost:80@evil.example", "app://localhost", "https://0.0.0.0"),
    ], 3),
)  # fmt: skip
def test_pages_that_may_not_use_the_gateway(guarded: Gateway, origin: str) -> None:
    answer = post(guarded, origin=origin)
    assert (answer.status_code, code_of(answer)) == (403, "E_GATEWAY_ORIGIN")
    assert "access-control-allow-origin" not in answer.headers
    with guarded.http() as client:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        answer = client.options(CHAT, headers=headers)
    assert (answer.status_code, answer.content) == (200, b"")  # which tells the browser that the page may not
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "origin",
    sampled(
        [
            *("https://chat.example.com", "app://notes", "tauri://localhost", "tauri://x", "same"),
            *("http://localhost", "http://localhost:3000", "https://LocalHost:8443", "http://app.localhost:5173"),
            *("http://127.0.0.1:3000", "http://127.8.8.8", "http://[::1]", "http://[::1]:3000"),
        ],
        3,
    ),
)
def test_pages_that_may(guarded: Gateway, origin: str) -> None:
    origin = guarded.url if origin == "same" else origin
    answer = post(guarded, origin=origin)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "origin" in answer.headers["vary"].lower()
    with guarded.http() as client:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-stainless-os",
            "access-control-request-private-network": "true",
        }
        answer = client.options(CHAT, headers={"origin": origin, **asked})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert b"Access-Control-Allow-Origin" in [name for name, _ in answer.headers.raw]


def test_a_page_of_elsewhere_can_neither_embed_an_answer_nor_take_it_for_a_script(guarded: Gateway) -> None:
    """``Cross-Origin-Resource-Policy`` is for requests without CORS, so the pages above are not concerned."""
    allowed, preflight = {"origin": "http://localhost:3000"}, {"access-control-request-method": "POST"}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
    with guarded.http() as client:
        answers = [
            *(client.get(path) for path in ("/v1/models", "/metrics", "/none", "/", "/chat", "/docs", CHAT)),
            client.get("/v1/models", headers={"origin": "https://evil.example"}),
            client.get("/v1/models", headers={"host": "evil.example"}),
            client.post(CHAT, json=body, headers=allowed),
            client.post(CHAT, content=b"{"),
            client.options(CHAT, headers={**allowed, **preflight}),
        ]
    assert {answer.status_code for answer in answers} == {200, 400, 403, 404, 405}
    for answer in answers:
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"], answer.request.url
        assert answer.headers.get_list("cross-origin-resource-policy") == ["same-origin"], answer.request.url


def test_a_name_that_was_rebound_to_this_machine_is_refused_whatever_its_origin(guarded: Gateway) -> None:
    for origin in ("http://evil.example:8080", "http://localhost:8080"):
        answer = post(guarded, host="evil.example:8080", origin=origin)
        assert (answer.status_code, code_of(answer)) == (403, "E_GATEWAY_HOST")


def test_errors_are_readable_for_pages_that_may_use_the_gateway(guarded: Gateway) -> None:
    with guarded.http(headers={"origin": "app://notes"}) as client:
        answer = client.post(CHAT, content=b"{")
    assert answer.status_code == 400
    assert answer.headers["access-control-allow-origin"] == "app://notes"


# -- sizes and times --


def large(n: int) -> bytes:
    body = json.dumps({**QUESTION, "user": ""}).encode()
    return body.replace(b'"user": ""', b'"user": "' + b"x" * (n - len(body)) + b'"')


@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_up_to_the_limit_and_beyond(guarded: Gateway, is_chunked: bool) -> None:
    def content(n: int) -> bytes | Iterator[bytes]:
        body = large(n)
        return (body[at : at + 777] for at in range(0, n, 777)) if is_chunked else body

    with guarded.http() as client:
        assert client.post(CHAT, content=content(MAX_BODY)).status_code == 200
        for n in (MAX_BODY + 1, 10 * MAX_BODY, 3_000_000):
            answer = client.post(CHAT, content=content(n))
            assert (answer.status_code, code_of(answer)) == (413, "E_GATEWAY_BODY_TOO_LARGE"), n
        assert client.post(CHAT, content=content(MAX_BODY)).status_code == 200


def test_a_body_is_not_compressed(guarded: Gateway) -> None:
    body = json.dumps(QUESTION).encode()
    with guarded.http() as client:
        assert client.post(CHAT, content=body, headers={"content-encoding": "identity"}).status_code == 200
        answer = client.post(CHAT, content=gzip.compress(body), headers={"content-encoding": "gzip"})
        assert (answer.status_code, code_of(answer)) == (415, "E_GATEWAY_ENCODING")
        assert "without Content-Encoding" in answer.text


def test_a_size_that_is_announced_is_refused_before_the_body_is_sent(guarded: Gateway) -> None:
    for length in (str(MAX_BODY + 1), "9" * 18):
        with Raw(guarded) as raw:
            raw.send(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n".encode())
            raw.send(f"content-length: {length}\r\n\r\n".encode())
            assert raw.rest().startswith(b"HTTP/1.1 413")


def test_who_sends_on_after_a_refusal_is_not_cut_off(guarded: Gateway) -> None:
    """Otherwise the connection would be reset, and a client that first sends everything would not see the answer."""
    n = 8 << 20
    with Raw(guarded) as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {n}\r\n\r\n".encode())
        assert raw.status() == 413
        raw.send(b"x" * n)
        assert b"E_GATEWAY_BODY_TOO_LARGE" in raw.rest()


def test_a_body_without_end_is_cut_off(guarded: Gateway) -> None:
    with Canary(guarded.daemon), Raw(guarded) as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with pytest.raises(OSError):  # noqa: PT011  (a reset connection or a broken pipe)
            for _ in range(100_000):
                raw.send(chunk)


def test_a_body_that_stops_in_the_middle_ends_with_a_timeout(guarded: Gateway) -> None:
    with Raw(guarded) as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
        answer = raw.rest()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"E_GATEWAY_BODY_TIMEOUT" in answer


def test_a_client_that_leaves_in_the_middle_of_its_body(guarded: Gateway) -> None:
    for _ in range(20):
        with Raw(guarded) as raw:
            raw.send(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
    assert post(guarded).status_code == 200


@pytest.mark.parametrize("headers", [{f"x-{n}": "y" for n in range(200)}, {"x": "y" * 40_000}])
def test_too_many_headers(guarded: Gateway, headers: dict[str, str]) -> None:
    answer = post(guarded, **headers)
    assert (answer.status_code, code_of(answer)) == (431, "E_GATEWAY_HEADERS")


def test_headers_without_end(guarded: Gateway) -> None:
    with Raw(guarded) as raw, pytest.raises(OSError):  # noqa: PT011  (a reset connection or a broken pipe)
        raw.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n")
        for n in range(100_000):
            raw.send(f"x-{n}: {'y' * 1000}\r\n".encode())
    assert post(guarded).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        "content-length: 5\r\ntransfer-encoding: chunked",
        "content-length: 5\r\ncontent-length: 6",
        "transfer-encoding: chunked, identity",
        "transfer-encoding: xchunked",
        "content-length: +5",
        "content-length: 5,5",
        "transfer-encoding : chunked",
        "content-length: 0x5",
    ],
)
def test_bodies_whose_end_is_ambiguous_are_refused_with_all_that_follows(guarded: Gateway, headers: str) -> None:
    smuggled = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with Raw(guarded) as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n".encode() + b"0\r\n\r\n" + smuggled)
        raw.sock.shutdown(socket.SHUT_WR)
        answer = raw.rest()
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_headers_after_a_body_have_no_effect(guarded: Gateway) -> None:
    body = json.dumps(QUESTION).encode()
    with Raw(guarded) as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n".encode())
        raw.send(b"connection: close\r\n\r\n%x\r\n%s\r\n0\r\norigin: https://evil.example\r\n\r\n" % (len(body), body))
        assert raw.rest().startswith(b"HTTP/1.1 200")


def test_the_id_of_a_request_is_given_back_also_with_a_refusal(guarded: Gateway) -> None:
    assert post(guarded, **{"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    answer = post(guarded, host="evil.example", **{"x-request-id": "mine-2"})
    assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"] == "mine-2"


# -- where it listens --


def test_an_address_for_other_machines_needs_keys(tmp_path: Path) -> None:
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0", "gpu.example.com:0"):
        found = serve(tmp_path, "--http", address)
        assert found.returncode == 1
        assert "uma-trio keys create NAME" in found.stderr
        assert "--insecure" in found.stderr


def test_other_settings_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("tenants: {a: {rpm: 3}}")
    os.mkfifo(tmp_path / "pipe")
    for flags, reason in (
        (("--http-keys", tmp_path / "none.yaml"), "make a first key"),
        (("--http-keys", tmp_path / "keys.yaml"), "unknown field `rpm`"),
        (("--http-keys", "/dev/null"), "it is not a regular file; choose another"),
        (("--tls-certificate", tmp_path / "pipe", "--tls-key", "b.pem"), "it is not a regular file; give the PEM"),
        (("--tls-certificate", "a.pem"), "give both"),
        (("--tls-certificate", "a.pem", "--tls-key", "b.pem"), "cannot read a.pem"),
    ):
        found = serve(tmp_path, "--http", "0", *flags)
        assert found.returncode == 1
        assert reason in found.stderr
        assert "Traceback" not in found.stderr


def test_https(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    authority = trustme.CA()
    ours, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    ours.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    ours.private_key_pem.write_to_path(tmp_path / "key.pem")
    other.private_key_pem.write_to_path(tmp_path / "other.pem")
    certificate = ("--tls-certificate", str(tmp_path / "certificate.pem"))
    for key, reason in (("other.pem", "key values mismatch"), ("certificate.pem", "do not work")):
        found = serve(tmp_path, "--http", "0", *certificate, "--tls-key", tmp_path / key)
        assert found.returncode == 1
        assert reason in found.stderr
    context = ssl.create_default_context()
    authority.configure_trust(context)
    flags = ("--http", "0.0.0.0:0", "--insecure", *certificate, "--tls-key", str(tmp_path / "key.pem"))
    with real_daemon(*flags) as daemon:
        url = Gateway.of(daemon).url.replace("0.0.0.0", "localhost")
        assert url.startswith("https://")
        with httpx.Client(base_url=url, verify=context, timeout=30) as client:
            assert client.post(CHAT, json=QUESTION, headers={"origin": url}).status_code == 200
