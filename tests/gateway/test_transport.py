"""The gateway's connections to the daemon, on a transport of asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvloop

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import missing, real_daemon
from uma_trio.client import Client, Eos
from uma_trio.gateway.charging import Account
from uma_trio.gateway.daemon_client import Daemon
from uma_trio.gateway.errors import HttpError
from uma_trio.gateway.limits import Limiter
from uma_trio.gateway.tenants import Tenant
from uma_trio.gateway.transport import MAX_BUFFERED_BYTES, ConnectionPool, DaemonStream
from uma_trio.gateway.usage import UsageFile

SHORT = {"prompt": "Hello", "max_tokens": 1, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 4000}


def test_bytes_arrive_in_order_and_then_the_end() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        async with await DaemonStream.open(ours) as stream:
            await stream.send(b"question")
            assert theirs.recv(100) == b"question"
            assert stream.is_quiet()
            theirs.sendall(b"an")
            assert not stream.is_quiet(), "the kernel has it"
            assert await stream.receive() == b"an"
            assert stream.is_quiet()
            theirs.sendall(b"swer")
            theirs.close()
            assert await stream.receive() == b"swer"
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            with pytest.raises(anyio.BrokenResourceError):
                await stream.send(b"more")
            assert not stream.is_quiet()

    asyncio.run(main())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_the_daemon_said_before_it_closed_is_read_also_after_a_failed_write(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        async with await DaemonStream.open(ours) as stream:
            theirs.sendall(b"too many connections")
            theirs.close()
            await stream.send(b"question")
            await stream.send(b"more")
            assert await stream.receive() == b"too many connections"
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()

    event_loop = loop()
    event_loop.run_until_complete(main())
    event_loop.close()


@pytest.mark.thorough
def test_a_reader_that_does_not_read_stops_the_daemon_from_sending() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        data = b"x" * (64 * MAX_BUFFERED_BYTES)
        async with await DaemonStream.open(ours) as stream:
            sent = 0
            for _ in range(1000):
                try:
                    sent += theirs.send(data[sent:])
                except BlockingIOError:
                    await asyncio.sleep(0)
            assert MAX_BUFFERED_BYTES <= sent < len(data) / 4
            received = len(await stream.receive())
            while received < sent:
                received += len(await stream.receive())
            assert received == sent
        theirs.close()

    asyncio.run(main())


def test_closing_it_closes_the_connection() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        async with await DaemonStream.open(ours):
            pass
        await asyncio.sleep(0)
        assert theirs.recv(1) == b""
        theirs.close()

    asyncio.run(main())


class CountingPool(ConnectionPool):
    """Counts the connections that it opens."""

    n_opened = 0

    async def open(self) -> tuple[Client, contextlib.AsyncExitStack]:
        self.n_opened += 1
        return await super().open()


def pooled(path: Path, *, idle_s: float = 600.0) -> tuple[CountingPool, Daemon]:
    pool = CountingPool(path, max_idle=2, idle_s=idle_s)
    return pool, Daemon(pool)


async def ask(daemon: Daemon, **fields: Any) -> Eos:
    (eos,) = await daemon.complete({**SHORT, **fields})
    return eos


def test_requests_of_two_tenants_follow_each_other_on_one_connection(gateway: Gateway, tmp_path: Path) -> None:
    async def main() -> None:
        pool, daemon = pooled(gateway.daemon.socket)
        limiter = Limiter(UsageFile(tmp_path / "usage"), now_ns=lambda: 0, unix_s=lambda: 0.0, connections=8)
        for name in ("ann", "bob"):
            acting = daemon.charging(Account(Tenant(name=name), limiter, 0))
            for n_turns in (1, 2):
                assert (await ask(acting, session_id=f"of-{name}")).reason == "length"
                async with acting.connect() as client:
                    (session,) = await client.sessions()
                assert (session.session_id, session.turns) == (f"of-{name}", n_turns)
            async with acting.connect() as client:
                await client.sessions("close", session_id=f"of-{name}")
        assert pool.n_opened == 1

    asyncio.run(main())


def test_few_connections_wait_for_their_next_request_and_not_for_long(gateway: Gateway) -> None:
    async def main() -> None:
        pool, daemon = pooled(gateway.daemon.socket)
        for n_opened in (3, 4):  # two of three are kept
            streams = [daemon.generate(SHORT) for _ in range(3)]
            batches = [await anext(stream) for stream in streams]
            assert all(batches)
            for stream in streams:
                async for _ in stream:
                    """To the end."""
            assert pool.n_opened == n_opened
        _, brief = pooled(gateway.daemon.socket, idle_s=0.01)
        await ask(brief)
        await asyncio.to_thread(
            gateway.daemon.wait_until, lambda found: found["connections"] <= 4, "two wait, of one pool"
        )

    asyncio.run(main())
    gateway.daemon.settled()


def test_a_request_that_does_not_end_well_closes_its_connection(gateway: Gateway) -> None:
    async def main() -> None:
        pool, daemon = pooled(gateway.daemon.socket)
        left = daemon.generate(LONG)
        await anext(left)
        await left.aclose()  # type: ignore[attr-defined]
        await asyncio.to_thread(gateway.daemon.settled)
        await ask(daemon)
        assert pool.n_opened == 2
        with pytest.raises(HttpError):
            await ask(daemon, max_tokens=10**8)
        await ask(daemon)
        assert pool.n_opened == 3

    asyncio.run(main())


def test_a_connection_that_the_daemon_closed_is_replaced(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)

    async def main() -> None:
        pool, daemon = pooled(tmp_path / "uma.sock")
        for n_opened in (1, 2):  # the loop does not run meanwhile, so only the kernel knows that the daemon has ended
            with real_daemon("--ctx", "4096", folder=tmp_path):
                for _ in range(2):
                    assert (await ask(daemon)).reason == "length"
                assert pool.n_opened == n_opened

    asyncio.run(main())
