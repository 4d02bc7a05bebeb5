"""Measure how long one client's large bodies and frames keep other clients waiting.

Each shape is sent once, and then on eight connections at once: bodies by one tenant, frames to the daemon's socket.
Another tenant has three streams, and a third connection asks for /healthz all the time.

python benches/bodies.py
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from body_shapes import FRAMES, MIB, SHAPES, Frame, Shape
from click.testing import CliRunner
from command import Place, bench, carry_out, places
from machine import machine
from report import cell, table
from rigs import free_port

from uma_trio.cli import main as uma_trio
from uma_trio.demo.temporary_daemon import temporary_daemon
from uma_trio.protocol.framing import frame

HOST: Final = "127.0.0.1"
STREAMS: Final = 3
READ_BYTES: Final = 1 << 20
ERROR_CODE: Final = re.compile(rb"E_[A-Z]+_[A-Z_]+")
PAUSE_S: Final = 0.3
"""Before and after each measurement."""
QUIET_MS: Final = 200.0
QUIET_LIMIT_S: Final = 20.0
"""A measurement begins when nobody waits longer than ``QUIET_MS``, or after this time."""
PROBE_PAUSE_S: Final = 0.005


@attrs.define
class Waits:
    """The longest wait of a client since ``begin``, the one that has not ended included."""

    longest_s: float = 0.0
    since: float | None = None
    """When the client began to wait; ``None``: it does not."""

    def begin(self) -> None:
        self.longest_s = 0.0
        if self.since is not None:
            self.since = trio.current_time()

    def wait(self) -> None:
        self.since = trio.current_time()

    def end(self) -> None:
        if self.since is not None:
            self.longest_s = max(self.longest_s, trio.current_time() - self.since)
        self.since = None

    def longest_ms(self) -> float:
        waiting_s = 0.0 if self.since is None else trio.current_time() - self.since
        return 1e3 * max(self.longest_s, waiting_s)


@attrs.frozen
class Others:
    """The other clients."""

    streams: Sequence[Waits] = attrs.field(factory=lambda: [Waits() for _ in range(STREAMS)])
    """Between two tokens."""
    probe: Waits = attrs.field(factory=Waits)
    """For an answer of /healthz."""

    async def are_served(self) -> None:
        """Wait until nothing of earlier bodies keeps them waiting."""
        with trio.move_on_after(QUIET_LIMIT_S):
            while True:
                self.begin()
                await trio.sleep(PAUSE_S)
                if max(waits.longest_ms() for waits in (*self.streams, self.probe)) < QUIET_MS:
                    return

    def begin(self) -> None:
        for waits in (*self.streams, self.probe):
            waits.begin()


@attrs.frozen
class Measurement:
    """What happened while bodies of one shape were sent."""

    gap_ms: float
    probe_ms: float
    answers: Mapping[str, int]
    """Status to number of answers; ``late`` for those that were not waited for."""


def request(method: str, path: str, body: bytes = b"", *, key: str = "", keep_alive: bool = False) -> bytes:
    """An HTTP request."""
    head = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(body)}"]
    if key:
        head.append(f"Authorization: Bearer {key}")
    if not keep_alive:
        head.append("Connection: close")
    return "\r\n".join([*head, "", ""]).encode() + body


async def stream(port: int, key: str, waits: Waits) -> None:
    """Ask for one stream after another, and note the longest time between two tokens of one."""
    body = b'{"prompt": "Once upon a time", "max_tokens": 100000, "ignore_eos": true, "stream": true}'
    while True:
        async with await trio.open_tcp_stream(HOST, port) as connection:
            await connection.send_all(request("POST", "/v1/completions", body, key=key))
            async for data in connection:
                if b"data: " in data:
                    waits.end()
                    if b"[DONE]" not in data:
                        waits.wait()


async def probe(port: int, waits: Waits) -> None:
    """Ask for /healthz over one connection, and note the longest answer."""
    async with await trio.open_tcp_stream(HOST, port) as connection:
        while True:
            waits.wait()
            await connection.send_all(request("GET", "/healthz", keep_alive=True))
            await connection.receive_some(READ_BYTES)
            waits.end()
            await trio.sleep(PROBE_PAUSE_S)


Connect = Callable[[], Awaitable[trio.SocketStream]]


async def send(connect: Connect, content: bytes, limit_s: float) -> str:
    """Send one request, read its answer, and return the status, or the code of an error on the socket."""
    status = b""
    with trio.move_on_after(limit_s):
        try:
            async with await connect() as connection, trio.open_nursery() as nursery:

                async def write() -> None:
                    try:
                        await connection.send_all(content)
                    except trio.BrokenResourceError:
                        """It is refused already."""

                nursery.start_soon(write)
                while data := await connection.receive_some(READ_BYTES):
                    is_http = data.startswith(b"HTTP")
                    status = status or (data[9:12] if is_http else b"".join(ERROR_CODE.findall(data)[:1]) or b"answer")
                nursery.cancel_scope.cancel()
        except* trio.BrokenResourceError:
            """The rest was on its way when the connection was closed."""
        return status.decode() or "closed"
    return "late"


async def measured(connect: Connect, content: bytes, n: int, others: Others, limit_s: float) -> Measurement:
    """Send a request ``n`` times at once."""
    answers: dict[str, int] = {}
    await others.are_served()
    others.begin()

    async def one() -> None:
        status = await send(connect, content, limit_s)
        answers[status] = answers.get(status, 0) + 1

    async with trio.open_nursery() as nursery:
        for _ in range(n):
            nursery.start_soon(one)
    await trio.sleep(PAUSE_S)
    gap_ms = max(waits.longest_ms() for waits in others.streams)
    return Measurement(gap_ms, others.probe.longest_ms(), answers)


async def work(
    flags: Sequence[str],
    shapes: Sequence[Shape | Frame],
    at_once: Sequence[int],
    limit_s: float,
    show: Callable[[str], None],
) -> list[list[str]]:
    """Measure all shapes; returns the rows of the table."""
    with tempfile.TemporaryDirectory(prefix="uma-bodies-") as folder:
        file = Path(folder, "keys.yaml")
        keys = [_new_key(file, name) for name in ("honest", "large")]
        port = free_port()
        http = ["--http", str(port), "--http-keys", str(file)]
        async with temporary_daemon([*flags, *http]) as daemon, trio.open_nursery() as nursery:
            others = Others()
            for waits in others.streams:
                nursery.start_soon(stream, port, keys[0], waits)
            nursery.start_soon(probe, port, others.probe)
            await trio.sleep(2)
            rows = []
            for shape in shapes:
                if isinstance(shape, Frame):
                    connect, content = partial(trio.open_unix_socket, daemon.path), frame(shape.payload())
                else:
                    connect = partial(trio.open_tcp_stream, HOST, port)
                    content = request(shape.method, shape.path, shape.body(), key=keys[1])
                rounds = [await measured(connect, content, n, others, limit_s) for n in at_once]
                rows.append(_row(shape, content, rounds))
                show(" | ".join(rows[-1]))
            nursery.cancel_scope.cancel()
    return rows


def _new_key(file: Path, name: str) -> str:
    result = CliRunner().invoke(uma_trio, ["keys", "create", name, "--file", str(file)])
    return result.stdout.strip()


def _row(shape: Shape | Frame, content: bytes, rounds: Sequence[Measurement]) -> list[str]:
    answers = "; ".join(
        ", ".join(f"{n} x {status}" for status, n in measurement.answers.items()) for measurement in rounds
    )
    figures = [cell(ms, 0) for measurement in rounds for ms in (measurement.gap_ms, measurement.probe_ms)]
    return [shape.name, f"{len(content) / MIB:.1f}", *figures, answers]


@bench()
@click.option("--at-once", default=8, type=click.IntRange(2), help="Connections that send together.")
@click.option("--limit-s", default=5.0, type=click.FloatRange(0.1), help="How long to wait for an answer, in seconds.")
@click.option("--only", multiple=True, default=[""], show_default=False, help="Only shapes whose names contain this.")
@places()
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(at_once: int, limit_s: float, only: Sequence[str], serve_flags: Sequence[str], **options: Any) -> None:
    """Measure what large bodies do to others.  SERVE_FLAGS after -- go to `uma-trio serve`."""
    place = Place.of(options)
    for line in machine():
        click.echo(line)
    flags = ["--model", str(place.model), "--threads", str(place.threads), "--parallel", "16", *serve_flags]
    shapes = [shape for shape in (*SHAPES, *FRAMES) if any(part in shape.name for part in only)]
    rows = carry_out(partial(work, flags, shapes, [1, at_once], limit_s, partial(click.echo, err=True)))
    heads = [f"{n}: {what}" for n in (1, at_once) for what in ("gap", "/healthz")]
    click.echo(table(("ms", "MiB", *heads, "answers"), rows))


if __name__ == "__main__":
    main()
