"""Large bodies at the gateway: work that grows with them comes in pieces, which take turns with other clients."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import msgspec
import pytest
import trio

from tests.support.serving import serving, settings
from uma_trio.gateway.answer import encode_items
from uma_trio.gateway.application import make_app
from uma_trio.processes.large_work import LargeWork

LARGE = [300] * 5_000


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[LargeWork]:
    """Whose pieces began, the daemon's excluded."""
    found: list[LargeWork] = []
    part = LargeWork.part

    def recorded(self: LargeWork) -> contextlib.AbstractAsyncContextManager[None]:
        if isinstance(self._lock, anyio.Lock):
            found.append(self)
        return part(self)

    monkeypatch.setattr(LargeWork, "part", recorded)
    return found


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with serving() as running:
        transport = httpx.ASGITransport(make_app(settings(socket=running.path)), client=("127.0.0.1", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as connected:
            yield connected
        await running.settled()


@pytest.mark.parametrize(
    ("path", "body", "n_pieces"),
    [
        ("/v1/embeddings", {"input": [LARGE, LARGE]}, 3),
        ("/v1/completions", {"prompt": LARGE}, 3),
        ("/completion", {"prompt": LARGE}, 3),
        ("/v1/generate", {"prompt": LARGE}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 5000}]}, 2),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a " * 5000}]}, 2),
        ("/v1/responses", {"input": "a " * 5000}, 2),
        ("/api/chat", {"messages": [{"role": "user", "content": "a " * 5000}]}, 2),
        ("/v1/rerank", {"query": "a", "documents": ["a "] * 5000}, 2),
        ("/detokenize", {"tokens": LARGE}, 2),
    ],
)
async def test_a_large_body_is_decoded_and_checked_in_pieces(
    autojump_clock: object, parts: list[LargeWork], path: str, body: dict[str, Any], n_pieces: int
) -> None:
    async with client() as connected:
        await connected.post(path, json=body)
        assert len(parts) >= n_pieces
        assert len(set(map(id, parts))) == 1, "all bodies take turns"


async def test_a_small_body_waits_for_no_turn(autojump_clock: object, parts: list[LargeWork]) -> None:
    async with client() as connected:
        answer = await connected.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
        assert answer.status_code == 200
    assert parts == []


async def test_long_lists_are_encoded_in_pieces(parts: list[LargeWork]) -> None:
    work = LargeWork(anyio.Lock(), trio.sleep)
    for n_items, n_pieces in ((0, 0), (10, 0), (11, 2), (35, 4)):
        parts.clear()
        found = await encode_items(work, range(n_items), lambda n: {"n": n}, per_piece=10)
        assert msgspec.json.decode(msgspec.json.encode(found)) == [{"n": n} for n in range(n_items)]
        assert len(parts) == n_pieces
