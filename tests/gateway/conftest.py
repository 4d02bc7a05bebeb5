"""Fixtures of the tests over HTTP: a real daemon with the embedded model, and its gateway."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import anthropic
import attrs
import httpx
import openai
import pytest

from tests.support.random_models import random_model
from tests.support.real_daemon import Canary, Daemon, missing, real_daemon

TIMEOUT_S = 120.0


@attrs.frozen
class Gateway:
    """The gateway of a running daemon."""

    daemon: Daemon
    url: str

    @classmethod
    def of(cls, daemon: Daemon) -> Gateway:
        """The gateway of a daemon that was started with ``--http 0``."""
        return cls(daemon, daemon.http_url())

    def http(self, **options: object) -> httpx.Client:
        """A client whose requests may take two minutes."""
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, **options)  # type: ignore[arg-type]

    def openai(self) -> openai.OpenAI:
        """The client of OpenAI, which does not retry."""
        return _openai(self.url)

    def anthropic(self) -> anthropic.Anthropic:
        """The client of Anthropic, which does not retry."""
        return _anthropic(self.url)


class HttpCanary(Canary):
    """A canary whose requests are streamed over HTTP, all over one connection."""

    def __init__(self, gateway: Gateway, **fields: Any) -> None:
        self._gateway = gateway
        super().__init__(gateway.daemon, **fields)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Callable[[], Sequence[object] | None]]:
        def ask() -> Sequence[object] | None:
            with client.stream("POST", "/v1/generate", json=self._fields) as answer:
                if answer.status_code == 429:
                    return None
                lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
            return [line["token_id"] for line in lines if "token_id" in line]

        with self._gateway.http() as client:
            yield ask


class Raw:
    """A connection to a gateway that sends bytes."""

    def __init__(self, gateway: Gateway) -> None:
        at = urlsplit(gateway.url)
        assert at.hostname is not None
        self.sock = socket.create_connection((at.hostname, at.port or 0), timeout=TIMEOUT_S)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def rest(self) -> bytes:
        """What comes until the gateway closes the connection."""
        parts = []
        try:
            while part := self.sock.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            """It closed while data was on its way to it."""
        return b"".join(parts)

    def status(self) -> int:
        """The status of the next response, read up to the end of its headers."""
        data = b""
        while b"\r\n\r\n" not in data:
            part = self.sock.recv(1)
            assert part, data
            data += part
        return int(data.split()[1])


# One client for each gateway: a client in the traceback of a refusal would be collected before it closes its sockets.


@functools.cache
def _openai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


@functools.cache
def _anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    """Shared by all tests of a process; a test must not leave anything behind in it."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--parallel", "16", "--ctx", "65536", "--http", "0") as daemon:
        yield Gateway.of(daemon)


@pytest.fixture(scope="session")
def ranking_gateway() -> Iterator[Gateway]:
    """The gateway of a daemon with a reranker."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    model = random_model("tiny-bert-rank", "f32", ctx=512)
    with real_daemon("--model", str(model), "--alias", "reranker", "--http", "0") as daemon:
        yield Gateway.of(daemon)


@pytest.fixture(scope="session")
def infill_gateway() -> Iterator[Gateway]:
    """The gateway of a daemon whose model can fill gaps."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    model = random_model("2x64", "f32", vocabulary="starcoder")
    with real_daemon("--model", str(model), "--http", "0") as daemon:
        yield Gateway.of(daemon)
