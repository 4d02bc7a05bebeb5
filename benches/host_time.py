"""Measure the engine's own CPU time for a step, next to what llama.cpp computes in it.

    python benches/host_time.py
    python benches/host_time.py --model /tmp/tiny-150k.gguf --streams 1,32 --temperatures 0,0.8 --steps 300

The worker serves a daemon that is nothing but a list of steps: each stream decodes, and each step runs ahead of the one before.
*host* is the CPU time of the worker's thread outside of ``llama_decode`` and ``llama_synchronize``.  *gap* is the part of it
for which a device waits: from the end of a computation to the next ``llama_decode``.  On a busy machine other programs empty
the caches, so compare two versions in turns, by the tenth of the steps that took least.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click
from command import FILE, bench, csv_option, numbers
from comparison import RunsFile
from machine import machine
from report import cell, table

from uma_trio import config
from uma_trio.demo.recording import percentile
from uma_trio.engine.llama import LlamaEngine
from uma_trio.engine.worker import Worker
from uma_trio.engine_link.messages import SampleRequest, Start, StepInput, SubmittedStep, encode
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.models.packaged import EMBEDDED

FIRST_STEPS = 10
"""Steps that do not count."""
PROMPT = (1, 2, 3, 4)


def serve_steps(sock: socket.socket, start: bytes, steps: list[bytes]) -> None:
    """What the daemon does: two steps are in flight until all are sent."""
    sock.sendall(start)
    answers = sock.makefile("rb")

    def answered() -> None:
        answers.read(int.from_bytes(answers.read(4), "little"))

    answered()  # the model is loaded
    for number, step in enumerate(steps):
        sock.sendall(step)
        if number:
            answered()
    answered()
    sock.close()


def steps_of(n_streams: int, temperature: float, n_steps: int) -> list[bytes]:
    """A step with the prompts of all streams, and steps that go on with all of them."""
    samples = [(SampleRequest(SamplingParams(temperature=temperature).with_seed(seed)),) for seed in range(n_streams)]
    prompts = [[StepInput(seq, 0, PROMPT, sample)] for seq, sample in enumerate(samples)]
    going_on: list[Any] = [[*range(n_streams)]]
    calls = [prompts, *[going_on] * n_steps]
    return [encode(SubmittedStep(calls=call, number=n, follows=n - 1)) for n, call in enumerate(calls, 1)]


@attrs.define
class Stopwatch:
    """The CPU time of this thread, in and between the calls that compute."""

    computed_s: float = 0.0
    ended_s: float = 0.0
    host_us: list[float] = attrs.field(factory=list)
    gap_us: list[float] = attrs.field(factory=list)
    _before_s: float = 0.0

    def around(self, function: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        """``function``, timed; one that ``begins`` a computation ends a gap."""

        def timed(*arguments: Any) -> Any:
            began_s = time.thread_time()
            if begins:
                self.gap_us.append(1e6 * (began_s - self.ended_s))
                self.host_us.append(1e6 * (began_s - self._before_s - self.computed_s))
                self._before_s, self.computed_s = began_s, 0.0
            try:
                return function(*arguments)
            finally:
                self.ended_s = time.thread_time()
                self.computed_s += self.ended_s - began_s

        return timed


class Calls:
    """The functions of the library, some of them replaced."""

    def __init__(self, functions: Any, **replaced: Callable[..., Any]) -> None:
        self._functions = functions
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        setattr(self, name, function)
        return function


def measured(model: Path, n_streams: int, temperature: float, n_steps: int, is_async: bool) -> Stopwatch:
    """The times of ``n_steps`` steps."""
    ours, theirs = socket.socketpair()
    settings = config.Model(parallel=n_streams, ctx=n_streams * 1024, threads=1)
    start = encode(Start(model, settings))
    steps = steps_of(n_streams, temperature, n_steps + FIRST_STEPS)
    daemon = multiprocessing.get_context("fork").Process(target=serve_steps, args=(theirs, start, steps))
    daemon.start()
    theirs.close()
    watch = Stopwatch()

    def opened(start: Start, _: object) -> LlamaEngine:
        engine = LlamaEngine(start.path, start.settings)
        engine.is_async = is_async
        context: Any = engine._context
        context._c = Calls(
            context._c,
            llama_decode=watch.around(context._c.llama_decode, begins=True),
            llama_synchronize=watch.around(context._c.llama_synchronize, begins=False),
        )
        return engine

    Worker(ours, opened).run()
    daemon.join()
    return watch


@bench()
@click.option(
    "--model", type=FILE, default=EMBEDDED, show_default=False, help="GGUF file.  [default: the embedded model]"
)
@click.option("--streams", default="1,8,128", help="Numbers of streams.")
@click.option("--temperatures", default="0,0.8", help="Temperatures; 0 is greedy.")
@click.option("--steps", type=click.IntRange(10), default=300, help="Steps that count.")
@click.option("--device/--no-device", default=True, help="In the order of a device, which computes after the call.")
@csv_option("the percentiles")
def main(model: Path, streams: str, temperatures: str, steps: int, device: bool, csv_file: Path | None) -> None:
    for line in machine():
        click.echo(line)
    names = ["streams", "temperature", "host_p10_us", "gap_p10_us", "host_p50_us", "gap_p50_us"]
    rows = []
    file = RunsFile(csv_file, names)
    for temperature in map(float, temperatures.split(",")):
        for n_streams in numbers(streams, "--streams"):
            watch = measured(model, n_streams, temperature, steps, device)
            percentiles = [
                percentile(times_us[-steps:], at) for at in (10, 50) for times_us in (watch.host_us, watch.gap_us)
            ]
            file.add(n_streams, temperature, *percentiles)
            rows.append([str(n_streams), f"{temperature:g}", *[cell(value, 1) for value in percentiles]])
    click.echo(table([name.replace("_", " ") for name in names], rows))


if __name__ == "__main__":
    main()
