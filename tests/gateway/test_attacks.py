"""Hostile clients over real connections, while other clients' streams go on unchanged over HTTP and over the socket.

``test_guard.py`` has the limits of sizes and times, one by one.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.gateway.conftest import Gateway, HttpCanary, Raw
from tests.support.profile import sampled
from tests.support.real_daemon import Canary, missing, real_daemon

MIB = 1 << 20
HOST = b"host: localhost\r\n"
NEXT = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/tokenize HTTP/1.1\r\n" + HOST
BODY = b'{"text":"x"}'
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
END = b"\r\n0\r\n\r\n"
LONG = json.dumps({"prompt": "Tell me a story", "max_tokens": 2000, "ignore_eos": True}).encode()

REFUSED = {
    "a folded header": b"GET /healthz HTTP/1.1\r\nx: a\r\n b\r\n" + HOST + b"\r\n" + NEXT,
    "a folded transfer-encoding": POST + b"transfer-encoding:\r\n chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n" + NEXT,
    "line feeds alone": b"GET /healthz HTTP/1.1\nhost: localhost\n\n" + NEXT,
    "one line feed alone": b"GET /healthz HTTP/1.1\r\nx: a\nhost: localhost\r\n\r\n" + NEXT,
    "a line feed at the end": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\n" + NEXT,
    "a carriage return alone": b"GET /healthz HTTP/1.1\r\nx: a\rb\r\n" + HOST + b"\r\n" + NEXT,
    "NUL in a value": b"GET /healthz HTTP/1.1\r\nx: a\0b\r\n" + HOST + b"\r\n" + NEXT,
    "NUL in a name": b"GET /healthz HTTP/1.1\r\nx\0y: a\r\n" + HOST + b"\r\n" + NEXT,
    "NUL in the path": b"GET /health\0z HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT,
    "a space in the path": b"GET /healthz x HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT,
    "a header without a colon": b"GET /healthz HTTP/1.1\r\n" + HOST + b"nonsense\r\n\r\n" + NEXT,
    "a space before the first header": b"GET /healthz HTTP/1.1\r\n " + HOST + b"\r\n" + NEXT,
    "two transfer-encodings": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: identity" + END + NEXT,
    "the same length twice": POST + b"content-length: 12\r\ncontent-length: 12\r\n\r\n" + BODY + NEXT,
    "a length below zero": POST + b"content-length: -1\r\n\r\n" + BODY + NEXT,
    "an empty length": POST + b"content-length: \r\n\r\n" + BODY + NEXT,
    "a length of 23 digits": POST + b"content-length: 99999999999999999999999\r\n\r\n" + BODY + NEXT,
    "two lengths in one": POST + b"content-length: 1 2\r\n\r\n" + BODY + NEXT,
    "a chunk with 0x": CHUNKED + b"0xc\r\n" + BODY + END + NEXT,
    "a chunk with a sign": CHUNKED + b"+c\r\n" + BODY + END + NEXT,
    "a chunk below zero": CHUNKED + b"-1\r\n" + BODY + END + NEXT,
    "a chunk with a space": CHUNKED + b"c \r\n" + BODY + END + NEXT,
    "a chunk of 18 digits": CHUNKED + b"ffffffffffffffffff\r\n" + BODY + END + NEXT,
    "chunks with line feeds alone": CHUNKED + b"c\n" + BODY + b"\n0\n\n" + NEXT,
    "a chunk that is longer than it says": CHUNKED + b"c\r\n" + BODY + b"XX0\r\n\r\n" + NEXT,
    "a line feed in the extension of a chunk": CHUNKED + b"c;a=\nb\r\n" + BODY + END + NEXT,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + b"\0" * 300,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": b"GET /healthz HTTP/9.9\r\n" + HOST + b"\r\n",
    "a tunnel": b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n" + NEXT,
    "a method of 300 letters": b"A" * 300 + b" / HTTP/1.1\r\n" + HOST + b"\r\n",
}
"""Requests whose end a proxy may see elsewhere, or that are none.  ``NEXT`` must not be served as a second one."""


@pytest.fixture(scope="module")
def attacked() -> Iterator[Gateway]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    flags = ("--parallel", "8", "--ctx", "32768", "--http-max-connections", "1100")
    with real_daemon("--http", "0", *flags) as daemon:
        yield Gateway.of(daemon)


@contextlib.contextmanager
def others_unchanged(gateway: Gateway) -> Iterator[None]:
    """Compare the streams of other clients with what they are alone; at the end nothing is left in the daemon."""
    with Canary(gateway.daemon), HttpCanary(gateway):
        yield
    gateway.daemon.settled()


@pytest.fixture(scope="module")
def canaries(attacked: Gateway) -> Iterator[None]:
    """For tests of many small attacks.  They come last: while the canaries run, a daemon never settles."""
    with others_unchanged(attacked):
        yield


def process_of(gateway: Gateway) -> psutil.Process:
    return psutil.Process(gateway.daemon.metrics()["gateway"]["pid"])


def test_a_client_that_sends_requests_and_reads_no_answer_is_bounded(attacked: Gateway) -> None:
    process = process_of(attacked)
    before = process.memory_info().rss
    with others_unchanged(attacked), Raw(attacked) as raw:
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sock.settimeout(2)
        sent = 0
        with contextlib.suppress(OSError):  # the gateway reads no more
            while sent < 64 * MIB:
                sent += raw.sock.send(NEXT * 500)
        print(f"{sent / MIB:.1f} MiB sent")
        assert sent < 64 * MIB
        assert process.memory_info().rss - before < 32 * MIB


@pytest.mark.thorough
def test_1000_idle_connections(attacked: Gateway) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2500:
        pytest.skip("needs more file descriptors: ulimit -n 4096")
    process = process_of(attacked)
    fds = process.num_fds()
    with others_unchanged(attacked), contextlib.ExitStack() as stack:
        for n in range(1000):
            raw = stack.enter_context(Raw(attacked))
            raw.send((b"", b"G", NEXT[:-2], POST + b"content-length: 12\r\n\r\n{")[n % 4])
        with attacked.http() as client:
            assert client.get("/healthz").status_code == 200
            assert client.post("/v1/tokenize", content=BODY).status_code == 200
        attacked.daemon.wait_until(lambda _: process.num_fds() >= fds + 750, "those that were accepted are open")
    attacked.daemon.wait_until(lambda _: process.num_fds() <= fds + 2, "their descriptors are free")


@pytest.mark.thorough
def test_headers_and_bodies_that_drip(attacked: Gateway) -> None:
    with others_unchanged(attacked), contextlib.ExitStack() as stack:
        drips = [stack.enter_context(Raw(attacked)) for _ in range(100)]
        for n, raw in enumerate(drips):
            raw.send(NEXT[:-2] if n % 2 else POST + b"content-length: 1000\r\n\r\n")
        for _ in range(20):
            for n, raw in enumerate(drips):
                raw.send(b"x: y\r\n" if n % 2 else b" ")
            with attacked.http() as client:
                assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("stream", sampled([b"true", b"false"], 2))
def test_clients_that_close_their_half(attacked: Gateway, stream: bytes) -> None:
    body = LONG[:-1] + b', "stream": ' + stream + b"}"
    request = b"POST /v1/generate HTTP/1.1\r\n" + HOST + b"content-length: %d\r\n\r\n" % len(body) + body
    with others_unchanged(attacked):
        for sent in (request, request[:-5], request[:40], NEXT[:-2]):
            with Raw(attacked) as raw:
                raw.send(sent)
                raw.sock.shutdown(socket.SHUT_WR)
                raw.rest()


@pytest.mark.parametrize("name", REFUSED)
def test_one_refusal_and_nothing_else(attacked: Gateway, canaries: None, name: str) -> None:
    with Raw(attacked) as raw:
        raw.send(REFUSED[name])
        answer = raw.rest()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_bytes_of_chance(attacked: Gateway, canaries: None) -> None:
    rng = random.Random(1)
    for _ in range(200):
        request = bytearray(POST + b"content-length: 12\r\nconnection: close\r\n\r\n" + BODY)
        for _ in range(rng.randint(1, 5)):
            request[rng.randrange(len(request))] = rng.randrange(256)
        with Raw(attacked) as raw:
            raw.send(request)
            raw.sock.shutdown(socket.SHUT_WR)
            assert b"HTTP/1.1 5" not in raw.rest(), bytes(request)


def test_requests_in_one_segment_are_answered_in_their_order(attacked: Gateway, canaries: None) -> None:
    requests = [
        b"GET %s HTTP/1.1\r\n%sx-request-id: %d\r\n" % (b"/nothing" if n % 2 else b"/healthz", HOST, n)
        for n in range(50)
    ]
    with Raw(attacked) as raw:
        raw.send(b"\r\n".join(requests) + b"connection: close\r\n\r\n")
        answer = raw.rest()
    ids = [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"x-request-id: ")]
    assert ids == [*range(50)]
    assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP/1.1 404 ") == 25


MESSAGE = {"role": "user", "content": "x"}
CHAT = {"messages": [MESSAGE], "max_tokens": 1}
MANY: dict[str, tuple[str, dict[str, object]]] = {
    "messages": ("/v1/chat/completions", {"messages": [MESSAGE] * 10_000}),
    "parts": ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_000}], "max_tokens": 1}),
    "messages of parts": ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1000}] * 10, "max_tokens": 1}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [{"type": "x"}] * 20_000}),
    "biases": ("/v1/completions", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(50_000)), 1)}),
    "unknown fields": ("/v1/chat/completions", {**CHAT, **{f"field{n}": n for n in range(50_000)}}),
    "unknown fields of the native API": ("/v1/generate", {"prompt": "x", "max_tokens": 1, **{f"field{n}": n for n in range(50_000)}}),
    "unknown options": ("/api/chat", {"model": "embedded", "messages": [MESSAGE], "options": {"num_predict": 1, **{f"o{n}": n for n in range(50_000)}}}),
    "items": ("/v1/responses", {"input": [{"type": "x"}] * 20_000}),
    "tokens": ("/v1/completions", {"prompt": [1] * 500_000}),
    "stops": ("/v1/generate", {"prompt": "x", "stop": [*range(200_000)]}),
    "texts": ("/v1/embeddings", {"input": ["x"] * 50_000}),
}  # fmt: skip
"""Bodies with so many values that looking at each of them, or naming it, would keep the gateway busy.

With more, they are not decoded at all: ``test_large_bodies.py``.
"""


@pytest.mark.parametrize("name", sampled(MANY, 4))
def test_bodies_of_many_small_values_have_short_answers(attacked: Gateway, canaries: None, name: str) -> None:
    path, body = MANY[name]
    with attacked.http() as client:
        answer = client.post(path, json=body, timeout=60)
    assert answer.status_code in (200, 400), answer.text[:300]
    assert len(answer.content) < 100_000
