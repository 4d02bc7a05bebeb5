"""Descriptors that come to the daemon's socket: what is taken, what is refused, and that none stays open."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from anyio._backends._trio import UNIXSocketStream

from tests.support.cases import all_cases
from tests.support.serving import serving
from uma_trio.client import Client, Eos, Failure
from uma_trio.daemon.doors import connection
from uma_trio.principal import Principal
from uma_trio.protocol import sealed_memory
from uma_trio.protocol.chat import MAX_MEDIA_BYTES
from uma_trio.protocol.codec import ClientCodec
from uma_trio.protocol.framing import HEADER_BYTES
from uma_trio.protocol.passed_files import LEAST_BYTES

pytestmark = pytest.mark.skipif(not sealed_memory.EXISTS, reason="this system has no sealed memory; Linux has")

NAMED = {"type": "image", "descriptor": True}
TEXT = {"type": "text", "text": "What is this?"}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "r", "messages": [{"role": "user", "content": [*parts, TEXT]}], "max_tokens": 1, **fields}


def sealed(size: int) -> int:
    found = sealed_memory._new()
    os.truncate(found, size)
    sealed_memory._fill(found, b"")
    return found


def n_open() -> int:
    return len(os.listdir("/proc/self/fd"))


class RawClient:
    """Sends messages with descriptors, whether they go together or not."""

    def __init__(self, path: Path) -> None:
        self._sock = trio.socket.socket(socket.AF_UNIX)
        self._path = path
        self._codec = ClientCodec()
        self.ended: str | None = None

    async def __aenter__(self) -> RawClient:
        await self._sock.connect(os.fspath(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sock.close()

    async def send(self, fields: dict[str, Any], descriptors: list[int]) -> None:
        data = self._codec.encode(fields)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(each.to_bytes(4, "little") for each in descriptors))]
        with contextlib.suppress(BrokenPipeError):  # it is refused already
            await self._sock.sendmsg([data[:HEADER_BYTES]], rights if descriptors else [])
            await trio.SocketStream(self._sock).send_all(data[HEADER_BYTES:])

    async def outcome(self) -> str:
        """How the next request ends: code and message of the error, or the reason.  ``ended`` has its ``id`` then."""
        while True:
            while (event := self._codec.next_event()) is None:
                data = await self._sock.recv(1 << 16)
                self._codec.receive_data(data)
                assert data, "closed without a reason"
            if isinstance(event, Failure | Eos):
                self.ended = event.id
            if isinstance(event, Failure):
                return f"{event.code}: {event.message}"
            if isinstance(event, Eos):
                return event.reason


@contextlib.contextmanager
def opened(makers: list[Callable[[], int]]) -> Iterator[list[int]]:
    descriptors = [make() for make in makers]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextlib.asynccontextmanager
async def raw_client() -> AsyncIterator[RawClient]:
    """A client of a daemon that has no more files open, and all of its room, after the client has left."""
    async with serving() as harness:
        await trio.testing.wait_all_tasks_blocked()
        before = n_open()
        async with RawClient(harness.path) as client:
            yield client
        await harness.settled()
        while n_open() > before:
            await trio.sleep(0.01)
        assert not harness.server.frame_room._taken


def read_end() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def of_file(flags: int) -> int:
    return os.open(__file__, flags)


SMALL = [lambda: sealed(5)]
UNSEALED = "E_PROTO_BAD_REQUEST: a descriptor has to be of memory that is sealed"


@all_cases(
    ("makers", "parts", "reason"),
    [
        (SMALL, [NAMED], "length"),
        (SMALL * 64, [NAMED] * 64, "length"),
        (SMALL, [NAMED] * 2, "names a descriptor, and none came with it"),
        (SMALL * 2, [NAMED], "descriptors that no part of the message names: 1"),
        (SMALL * 2, [], "descriptors that no part of the message names: 2"),
        (SMALL * 65, [NAMED] * 65, "at most 64 come with a message"),
        ([lambda: sealed(MAX_MEDIA_BYTES)] * 2, [NAMED] * 2, "length"),
        ([*[lambda: sealed(MAX_MEDIA_BYTES)] * 2, *SMALL], [NAMED] * 3, "the descriptors of a message have 67108869"),
        ([lambda: sealed(MAX_MEDIA_BYTES + 1)], [NAMED], "E_PROTO_FRAME_TOO_LARGE"),
        ([lambda: sealed(1 << 40)], [NAMED], "E_PROTO_FRAME_TOO_LARGE"),
        ([sealed_memory._new], [NAMED], UNSEALED),
        ([lambda: of_file(os.O_RDONLY)], [NAMED], UNSEALED),
        ([lambda: of_file(os.O_PATH)], [NAMED], UNSEALED),
        ([lambda: os.open("/dev/zero", os.O_RDONLY)], [NAMED], UNSEALED),
        ([lambda: os.open("/proc/self/environ", os.O_RDONLY)], [NAMED], UNSEALED),
        ([lambda: os.open("/", os.O_RDONLY)], [NAMED], UNSEALED),
        ([read_end], [NAMED], UNSEALED),
        ([lambda: socket.socket().detach()], [NAMED], UNSEALED),
        ([*SMALL, read_end, *SMALL], [NAMED] * 3, UNSEALED),
    ],
)
def test_only_sealed_memory_within_bounds_is_taken(
    makers: list[Callable[[], int]], parts: list[dict[str, Any]], reason: str
) -> None:
    async def asked() -> None:
        async with raw_client() as client:
            with opened(makers) as descriptors:
                await client.send(chat(*parts), descriptors)
            assert reason in await client.outcome()
            if "names" in reason:
                assert client.ended == "r"

    trio.run(asked, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_of_several_messages_each_takes_its_own(autojump_clock: object) -> None:
    """Also when they have all arrived before the daemon reads, and when a request is refused."""
    async with raw_client() as client:
        for n in range(1, 4):
            with opened(SMALL * n) as descriptors:
                await client.send(chat(*[NAMED] * n, id=f"r{n}", keep_alive=True), descriptors)
        found = [(await client.outcome())[:12] for _ in range(3)]
        assert sorted(found) == ["E_PROTO_BUSY"] * 2 + ["length"]
        await client.send({"type": "models"}, [])


async def test_another_user_passes_nothing(autojump_clock: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "principal_of", lambda sock: Principal("uid:60001"))
    async with raw_client() as client:
        with opened(SMALL) as descriptors:
            await client.send(chat(NAMED), descriptors)
        assert "names a descriptor, and none came with it" in await client.outcome()


async def test_files_take_room_until_their_request_ends(autojump_clock: object) -> None:
    async with serving() as harness:
        harness.server.frame_room.max_bytes = 40 << 20
        async with RawClient(harness.path) as client, RawClient(harness.path) as other:
            with opened([lambda: sealed(30 << 20)]) as descriptors:
                await client._sock.sendmsg(
                    [b"\x10"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, bytes([descriptors[0], 0, 0, 0]))]
                )
                await trio.testing.wait_all_tasks_blocked()
                await other.send(chat(NAMED), descriptors)
            assert (await other.outcome()).startswith("E_LIMIT_QUEUE: too many large messages arrive")
        await harness.settled()
        assert not harness.server.frame_room._taken


async def test_the_client_passes_large_bytes_and_nothing_where_that_is_not_possible(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []
    send_fds = UNIXSocketStream.send_fds

    async def recorded(self: Any, message: bytes, descriptors: Any) -> None:
        passed.append(len(descriptors))
        await send_fds(self, message, descriptors)

    monkeypatch.setattr(UNIXSocketStream, "send_fds", recorded)

    async def asks(client: Client, data: bytes | str) -> list[int]:
        passed.clear()
        await client.complete(**chat({"type": "image", "data": data}, keep_alive=True))
        return list(passed)

    async with serving() as harness:
        async with harness.client() as client:
            assert await asks(client, b"x" * LEAST_BYTES) == [1]
            assert await asks(client, b"x" * (LEAST_BYTES - 1)) == []
            assert await asks(client, "eHh4" * LEAST_BYTES) == []
            monkeypatch.setattr(sealed_memory, "_new", _forbidden)
            assert await asks(client, b"x" * LEAST_BYTES) == []
        monkeypatch.setattr(sealed_memory, "user_id_of_peer", lambda sock: 60001)
        async with harness.client() as client:
            assert await asks(client, b"x" * LEAST_BYTES) == []
        await harness.settled()


def _forbidden() -> int:
    raise PermissionError("no such memory here")
