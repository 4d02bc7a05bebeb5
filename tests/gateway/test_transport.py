"""The gateway's connections to the daemon, on a transport of asyncio."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import anyio
import pytest
import uvloop

from uma_trio.gateway.transport import MAX_BUFFERED_BYTES, DaemonStream


def test_bytes_arrive_in_order_and_then_the_end() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        async with await DaemonStream.open(ours) as stream:
            await stream.send(b"question")
            assert theirs.recv(100) == b"question"
            theirs.sendall(b"an")
            assert await stream.receive() == b"an"
            theirs.sendall(b"swer")
            theirs.close()
            assert await stream.receive() == b"swer"
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            with pytest.raises(anyio.BrokenResourceError):
                await stream.send(b"more")

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
