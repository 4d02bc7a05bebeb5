"""Fixtures of the tests over HTTP: a real daemon with the embedded model, and its gateway."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import anthropic
import attrs
import httpx
import openai
import pytest

from tests.support.real_daemon import Daemon, missing, real_daemon


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
        """A client whose requests may take half a minute."""
        return httpx.Client(base_url=self.url, timeout=30, **options)  # type: ignore[arg-type]

    def openai(self) -> openai.OpenAI:
        """The client of OpenAI, which does not retry."""
        return _openai(self.url)

    def anthropic(self) -> anthropic.Anthropic:
        """The client of Anthropic, which does not retry."""
        return _anthropic(self.url)


# One client for each gateway: a client in the traceback of a refusal would be collected before it closes its sockets.


@functools.cache
def _openai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


@functools.cache
def _anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    """Shared by all tests of a process; a test must not leave anything behind in it."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--parallel", "16", "--ctx", "65536", "--http", "0") as daemon:
        yield Gateway.of(daemon)
