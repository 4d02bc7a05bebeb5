"""Bounds on what comes before the body of a request, with uvicorn and an application that does nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import anyio
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from uma_trio.gateway import process
from uma_trio.gateway.process import MAX_HEAD_BYTES, BoundedHttp

TIMEOUT_S = 1.0
IDLE_TIMEOUT_S = 1
MAX_CONNECTIONS = 5


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer in pieces; /slow takes longer than a client may take for its headers."""
    while (await receive()).get("more_body"):
        """The body is not looked at."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(4):
        await send({"type": "http.response.body", "body": b"piece\n", "more_body": True})
        await anyio.sleep(TIMEOUT_S if scope["path"] == "/slow" else 0)
    late = [b"late" for name, _ in scope["headers"] if name == b"x-late"]
    overloaded = [b"overloaded"] if scope["state"]["is_overloaded"] else []
    await send({"type": "http.response.body", "body": b" ".join([*late, *overloaded, b"end"])})


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(process, "HEAD_TIMEOUT_S", TIMEOUT_S)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(
            app,
            http=BoundedHttp,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=IDLE_TIMEOUT_S,
            lifespan="off",
            log_config=None,
            ws="none",
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield sock.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def answer(address: tuple[str, int], *parts: bytes) -> bytes:
    """What comes until the server closes the connection."""
    with socket.create_connection(address, timeout=60) as sock:
        found = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                sock.sendall(part)
            while data := sock.recv(65536):
                found += data
        return found


def test_a_connection_without_a_request_is_closed(address: tuple[str, int]) -> None:
    assert answer(address) == b""


@pytest.mark.parametrize("head", [b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhost: localhost\r\n"])
def test_headers_that_stop_in_the_middle(address: tuple[str, int], head: bytes) -> None:
    assert answer(address, head).startswith(b"HTTP/1.1 408 ")


def test_headers_of_a_later_request_that_stop_in_the_middle(address: tuple[str, int]) -> None:
    found = answer(address, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"GET / HTTP/1.1\r\n")
    assert found.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in found


def test_an_answer_and_a_body_may_take_longer(address: tuple[str, int]) -> None:
    found = answer(address, b"GET /slow HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert found.count(b"piece") == 4
    assert b"end" in found
    with socket.create_connection(address, timeout=60) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 4\r\n\r\n")
        threading.Event().wait(3 * TIMEOUT_S)
        sock.sendall(b"body")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_large_headers_end_the_connection(address: tuple[str, int]) -> None:
    line = b"x: " + b"y" * 1000 + b"\r\n"
    lines = MAX_HEAD_BYTES // len(line)
    begin, end = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n", b"\r\n"
    assert answer(address, begin + line * (lines - 1) + end).startswith(b"HTTP/1.1 200 ")
    assert b" 200 " not in answer(address, begin, *[line] * 100 * lines)
    assert b" 200 " not in answer(address, b"GET /" + b"a" * (2 * MAX_HEAD_BYTES))


def test_headers_after_the_body_are_not_those_of_the_request(address: tuple[str, int]) -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    found = answer(address, head + b"4\r\nbody\r\n0\r\nx-late: 1\r\n\r\n")
    assert b"end" in found
    assert b"late" not in found


def test_more_connections_than_allowed(address: tuple[str, int]) -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(2 * MAX_CONNECTIONS):
            sock = stack.enter_context(socket.create_connection(address, timeout=60))
            sock.sendall(head)
            assert sock.recv(65536).startswith(b"HTTP/1.1 100 ")
            socks.append(sock)
        assert answer(address, head) == b""
        for n, sock in enumerate(socks):
            sock.sendall(b"body")
            found = b""
            while data := sock.recv(65536):
                found += data
            assert b"end" in found
            assert (b"overloaded" in found) == (n >= MAX_CONNECTIONS)
    assert b"overloaded" not in answer(address, head + b"body")


GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.parametrize("bytes_between", [b"", b"\r\n", b"\r\n\r\n"])
def test_a_connection_without_another_request_is_closed(address: tuple[str, int], bytes_between: bytes) -> None:
    with socket.create_connection(address, timeout=60) as sock:
        sock.sendall(GET)
        found = b""
        while b"end" not in found:
            found += sock.recv(65536)
        sock.sendall(bytes_between)
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(65536):
                found += data
    assert found.count(b" 200 ") == 1


def test_a_later_request_may_take_longer_than_a_connection_may_be_idle(address: tuple[str, int]) -> None:
    slow = GET.replace(b"GET /", b"GET /slow")
    found = answer(address, GET, slow, GET)
    assert found.count(b" 200 ") == 3
    assert found.count(b"end") == 3


@pytest.mark.parametrize("sent", [b"", b"G", GET[:-2], GET])
def test_connections_without_a_request_keep_nobody_out(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(process, "HEAD_TIMEOUT_S", 60.0)
    with contextlib.ExitStack() as stack:
        for _ in range(6 * MAX_CONNECTIONS):
            sock = stack.enter_context(socket.create_connection(address, timeout=60))
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
                if sent == GET:
                    sock.recv(65536)
            found = answer(address, GET[:-2] + b"connection: close\r\n\r\n")
            assert b"end" in found
            assert b"overloaded" not in found
