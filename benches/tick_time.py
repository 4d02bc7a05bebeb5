"""Measure the daemon's own CPU time for a token, or how many functions it calls for one.

    python benches/tick_time.py
    python benches/tick_time.py --streams 1,128 --pass-ms 2 --calls

The scheduler serves streams whose engine is a process with nothing but random tokens, and whose clients only read.  The
engine answers at once, and says that a forward pass took ``--pass-ms``: the daemon plans as on such a device.  *tokens* are
those of a tick.  On a busy machine compare two versions in turns, by the tenth of the tokens that took least CPU time.
The calls hardly depend on the machine.
"""

from __future__ import annotations

import multiprocessing
import random
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

import attrs
import click
import numpy as np
import structlog
import trio
from command import bench, csv_option, numbers
from comparison import RunsFile
from machine import machine
from report import cell, table

from uma_trio import config
from uma_trio.daemon.doors.outbox import Outbox
from uma_trio.daemon.engines.link import EngineLink
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.demo.recording import percentile
from uma_trio.engine_link.devices import Devices
from uma_trio.engine_link.messages import (
    Decoder,
    LayoutReport,
    ModelInfo,
    Ready,
    Start,
    Step,
    StepInput,
    StepOutput,
    encode,
)
from uma_trio.principal import Principal
from uma_trio.protocol.codec import ServerCodec
from uma_trio.protocol.requests import Generate

FIRST_TICKS: Final = 50
"""Ticks that do not count."""
N_VOCAB: Final = 32_000
MAX_TOKENS: Final = 1_000_000
PROMPT: Final = np.arange(1, 17, dtype=np.int32)
NOISE: Final = 0.05
"""By how much the time of a step varies, as a share."""


def received(sock: socket.socket) -> bytes:
    """What has come; nothing if the other end is closed."""
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""


def compute_nothing(sock: socket.socket, pass_ms: float) -> None:
    """Answer each step with random tokens."""
    rng, decoder = random.Random(0), Decoder("daemon")
    while data := received(sock):
        for step in decoder.feed(data):
            if isinstance(step, Step):
                began_s = time.perf_counter()
                samples = [
                    len(item.samples) if isinstance(item, StepInput) else 1 for call in step.calls for item in call
                ]
                tokens = tuple([rng.randrange(1, N_VOCAB) for _ in range(step.n_passes * sum(samples))])
                ms = step.n_passes * pass_ms * (1 + rng.gauss(0, NOISE))
                output = StepOutput(tokens, step.number, ms, started_s=began_s, ended_s=time.perf_counter())
                output.n_passes = step.n_passes
                sock.sendall(encode(output))


def read_all(socks: list[socket.socket]) -> None:
    """Read what comes, until all are closed."""
    poll = select.epoll()
    for sock in socks:
        poll.register(sock, select.EPOLLIN)
    left = {sock.fileno(): sock for sock in socks}
    while left:
        for number, _ in poll.poll():
            if not received(left[number]):
                poll.unregister(number)
                del left[number]


def in_a_process(function: Any, theirs: list[socket.socket], ours: list[socket.socket], *arguments: Any) -> None:
    """Run ``function`` in a fork that has ``theirs``, until we close ``ours`` or end."""

    def run() -> None:
        for sock in ours:
            sock.close()
        function(*arguments)

    multiprocessing.get_context("fork").Process(target=run, daemon=True).start()
    for sock in theirs:
        sock.close()


class NoProcess:
    """The engine's process, which is not watched."""

    pid: int | None = None

    def kill(self) -> None:
        raise AssertionError("the engine is killed")

    async def wait(self) -> str:
        await trio.sleep_forever()

    def usage(self) -> dict[str, float]:
        return {}


def engine_of(n_streams: int, pass_ms: float) -> SupervisedEngine:
    """An engine with room for ``n_streams``."""
    n_ctx = n_streams * (MAX_TOKENS + 100)
    info = ModelInfo(
        name="none",
        description="none",
        n_vocab=N_VOCAB,
        n_ctx=n_ctx,
        n_ctx_seq=n_ctx // n_streams,
        n_ctx_train=n_ctx,
        n_batch=512,
        n_seq_max=n_streams,
        eog_ids=(0,),
        size_bytes=1,
        n_params=1,
        unified=False,
    )
    ours, theirs = socket.socketpair()
    in_a_process(compute_nothing, [theirs], [ours], theirs, pass_ms)
    link = EngineLink(ours, NoProcess())
    link.ready = Ready(info, LayoutReport("none", "none"), Devices(backend="none", found=()), "", "")
    link._attach_interrupts()
    launcher: Any = None
    return SupervisedEngine(launcher, Start(Path("none"), config.Model()), link, config.Engine())


@attrs.define
class Calls:
    """How many functions are called, of Python and of C, while ``sys.setprofile`` has ``count``."""

    n_python: int = 0
    n_c: int = 0

    def count(self, frame: object, event: str, argument: object) -> None:
        self.n_python += event == "call"
        self.n_c += event == "c_call"


@attrs.frozen
class Figures:
    """What tokens took."""

    token_us: list[float]
    """CPU time for a token, of each turn of the scheduler's loop."""
    n_tokens: int
    n_ticks: int
    calls: Calls
    """For all tokens; none if they are not counted."""


async def measured(n_streams: int, pass_ms: float, n_ticks: int, counts: bool) -> Figures:
    """What ``n_ticks`` ticks of ``n_streams`` take."""
    settings = config.load(flags={"parallel": n_streams, "max_tokens": MAX_TOKENS})
    scheduler = Scheduler(engine_of(n_streams, pass_ms), lambda token: b" %d" % token, settings)
    pairs = [socket.socketpair() for _ in range(n_streams)]
    ours, theirs = [first for first, _ in pairs], [second for _, second in pairs]
    in_a_process(read_all, theirs, ours, theirs)
    token_us: list[float] = []
    done, calls, telemetry = trio.Event(), Calls(), scheduler.telemetry
    first = last = (0, 0, 0.0)

    def turned() -> None:
        nonlocal first, last
        now = telemetry.ticks_total, telemetry.totals["tokens"], time.thread_time()
        if now[0] < FIRST_TICKS:
            return
        if not last[0]:
            first = now
            if counts:
                sys.setprofile(calls.count)
        elif now[1] > last[1]:
            token_us.append(1e6 * (now[2] - last[2]) / (now[1] - last[1]))
        last = now
        if now[0] - first[0] >= n_ticks:
            sys.setprofile(None)
            done.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(scheduler.run)
        for n, sock in enumerate(ours):
            sock.setblocking(False)
            codec = ServerCodec("auto", max_frame_bytes=1 << 20)
            outbox = Outbox(sock, codec.encode, max_bytes=1 << 20, write_timeout_s=60, on_room=lambda: None)
            nursery.start_soon(outbox.run)
            request = Generate(id=f"stream {n}", prompt="", max_tokens=MAX_TOKENS, temperature=0.0)
            scheduler.submit(PreparedRequest(request, Prompt(PROMPT, ""), outbox, Principal("bench")))
        scheduler.on_step = turned
        await done.wait()
        nursery.cancel_scope.cancel()
    for sock in ours:
        sock.close()
    return Figures(token_us, last[1] - first[1], last[0] - first[0], calls)


@bench()
@click.option("--streams", default="1,8,32", help="Numbers of streams.")
@click.option("--pass-ms", "passes", default="0.6,9", help="What a forward pass takes, one or several.")
@click.option("--ticks", type=click.IntRange(10), default=1000, help="Ticks that count.")
@click.option("--calls", "counts", is_flag=True, help="Count function calls instead of time.")
@csv_option("the figures")
def main(streams: str, passes: str, ticks: int, counts: bool, csv_file: Path | None) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    for line in machine():
        click.echo(line)
    names = ["pass_ms", "streams", "tokens"]
    names += ["python_calls", "c_calls"] if counts else ["cpu_p10_us", "cpu_p50_us"]
    file, rows = RunsFile(csv_file, names), []
    for pass_ms in map(float, passes.split(",")):
        for n_streams in numbers(streams, "--streams"):
            measurement = trio.run(measured, n_streams, pass_ms, ticks, counts)
            figures = [n / measurement.n_tokens for n in (measurement.calls.n_python, measurement.calls.n_c)]
            if not counts:
                figures = [percentile(measurement.token_us, at) for at in (10, 50)]
            tokens = measurement.n_tokens / measurement.n_ticks
            file.add(pass_ms, n_streams, round(tokens, 2), *figures)
            rows.append([f"{pass_ms:g}", str(n_streams), cell(tokens, 1), *[cell(figure, 1) for figure in figures]])
    click.echo(table([name.replace("_", " ") for name in names], rows))


if __name__ == "__main__":
    main()
