"""The benchmarks of ``uma-trio bench``: their arguments, how they run, and their outcomes."""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import attrs

if TYPE_CHECKING:
    import trio

PERF_LOG: Final = "perf.jsonl"
STOP_S: Final = 15.0
"""How long a benchmark may take to stop its servers before it is killed."""


@attrs.frozen(kw_only=True)
class Bench:
    """A script with its arguments."""

    name: str
    title: str
    about: str
    """The question that it answers, for the report."""
    script: str
    full: str = ""
    """Arguments of a full run."""
    quick: str
    """Arguments of a quick run."""
    rival: tuple[str, str] | None = ("--rival", "--no-rival")
    """Arguments with llama-server and without; ``None`` if there is nothing to compare with."""
    embedded: bool = False
    """Always uses the embedded model."""
    needs_rival: bool = False
    csv: bool = True
    has_plot: bool = False
    """Draws a plot with ``--plot``."""
    perf_log: bool = False
    """Passes ``--perf-log`` to its daemon."""
    serve: str = ""
    """Flags of its daemon."""
    threads: bool = True
    """Takes ``--threads``."""
    min_gpus: int = 0
    """GPUs without which it is left out."""


BENCHES: Final = (
    Bench(
        name="mixed", title="Short streams next to a long prompt", script="mixed_load.py",
        about="Three interactive streams are running when a long prompt arrives. Do they freeze?",
        full="--tokens 400", quick="--tokens 120 --long-words 500 --long-after 20", rival=None, perf_log=True,
    ),
    Bench(
        name="pareto", title="Wall time against p99", script="mixed_load.py",
        about="The same load at several settings of both servers. Is any setting of the rival better in both?",
        full="--long 5 --repeat 3",
        quick="--tokens 100 --long 2 --long-words 400 --long-after 20 --rival-batch 2048,64 "
        "--ours '--target-itl-ms 60' --ours '--target-itl-ms 200'",
        rival=("--rival llama-server", ""), needs_rival=True, has_plot=True,
    ),
    Bench(
        name="throughput", title="Plain streams", script="throughput.py",
        about="Tokens per second of streams that start together.",
        full="--streams 1,4,8,32 --repeat 3", quick="--streams 1,4 --tokens 64", rival=("--rivals", "--no-rivals"),
    ),
    Bench(
        name="goodput", title="Goodput against arrival rate", script="goodput.py",
        about="Poisson arrivals of short chats and some long prompts. "
        "A good request has its first token within 1 s and a p99 inter-token latency of at most 100 ms.",
        quick="--seconds 6 --drain 3", has_plot=True,
    ),
    Bench(
        name="overload", title="Twice the load that the server can handle", script="goodput.py",
        about="Do admitted requests meet their SLO? How soon are the others refused? Does memory grow?",
        full="--overload 2", quick="--overload 2 --seconds 6 --overload-s 10 --drain 3",
    ),
    Bench(
        name="tenants", title="Two users with different numbers of clients", script="goodput.py",
        about="One user has three times as many clients as the other. Each should get half of the service. Needs root.",
        full="--tenants --seconds 90", quick="--tenants --seconds 20", rival=None, csv=False,
    ),
    Bench(
        name="long_ctx", title="Decode speed against context length", script="long_ctx.py",
        about="Decode speed of one stream as its context grows.",
        quick="--contexts 512,1024,2048 --tokens 32 --repeat 1", has_plot=True,
    ),
    Bench(
        name="ipc", title="Cost of transport", script="ipc_overhead.py",
        about="Unix socket with JSON and with CBOR, and HTTP with server-sent events. "
        "With the embedded model, since transport matters most for small models.",
        quick="--requests 10 --tokens 150 --repeat 1", embedded=True,
    ),
    Bench(
        name="cancel", title="Cancellation", script="cancel.py",
        about="Time from a cancel to the first token of the next request in the queue, with a single sequence.",
        quick="--repeat 4 --long-tokens 1000",
    ),
    Bench(
        name="fanout", title="Requests with a common prefix", script="fanout.py",
        about="Eight requests with a common prefix of 2,000 tokens arrive together. How often is it computed?",
        quick="--requests 4 --prefix-tokens 400",
    ),
    Bench(
        name="sessions", title="Sessions that continue", script="sessions.py",
        about="Time to the first token of a session's next turn, from the KV cache, and from disk after a restart.",
        quick="--tokens 1000 --repeat 2", rival=None,
    ),
    Bench(
        name="churn", title="More sessions than fit into memory", script="sessions.py",
        about="Five hundred sessions with memory for twenty, one hour compressed. Is anything lost? "
        "Does memory stay bounded? How long does a copy delay other streams?",
        full="--churn", quick="--churn --sessions 30 --room 5 --turns 3 --hour 0.005", rival=None,
    ),
    Bench(
        name="lookup", title="Prompt lookup", script="lookup.py",
        about="Speculative decoding with prompt lookup, for answers that copy the prompt and for answers that do not. "
        "With the embedded model.",
        quick="--questions 1 --tokens 300 --repeat 1",
        rival=("--rival-flags '-fa off' --rival-flags '-fa off --spec-type ngram-simple'", ""), embedded=True,
    ),
    Bench(
        name="modes", title="The engine in its own process and in a thread", script="engine_modes.py",
        about="What does the separation cost in throughput, latency and time to start?",
        full="--rounds 5", quick="--rounds 1 --tokens 64", rival=None,
    ),
    Bench(
        name="recovery", title="Crashes of the engine", script="recovery.py",
        about="The engine is killed at random moments under load. Are all texts right, and how long do streams pause? "
        "With the embedded model.",
        full="--count 100", quick="--count 8", rival=None, embedded=True,
    ),
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Settings:
    """Options that apply to all benchmarks."""

    folder: Path
    """The folder of the scripts."""
    out: Path
    quick: bool
    rival: bool
    model: Path | None
    """``None`` is the embedded model."""
    threads: int | None
    has_matplotlib: bool

    def command(self, bench: Bench) -> list[str]:
        """Return the command line of ``bench``."""
        arguments = [
            sys.executable,
            str(self.folder / bench.script),
            *shlex.split(bench.quick if self.quick else bench.full),
        ]
        if bench.rival is not None:
            arguments += shlex.split(bench.rival[0 if self.rival else 1])
        if self.model is not None and not bench.embedded:
            arguments += ["--model", str(self.model)]
        if self.threads is not None and bench.threads:
            arguments += ["--threads", str(self.threads)]
        if bench.csv:
            arguments += ["--csv", str(self.out / f"{bench.name}.csv")]
        if bench.has_plot and self.has_matplotlib:
            arguments += ["--plot", str(self.out / f"{bench.name}.png")]
        if bench.name == "long_ctx":
            arguments += ["--csv-all", str(self.out / "long_ctx_all.csv")]
        serve = shlex.split(bench.serve)
        if bench.perf_log:
            serve += ["--perf-log", str(self.out / PERF_LOG)]
        return [*arguments, "--", *serve] if serve else arguments


@attrs.frozen(kw_only=True)
class Outcome:
    """The outcome of one benchmark."""

    bench: Bench
    command: list[str]
    code: int
    """The exit code."""
    duration_s: float
    stdout: str
    stderr: str
    cut_off: bool = False
    """Its time was over before its end.  Rows of complete runs are in its CSV file."""

    @property
    def skipped(self) -> str | None:
        """The reason why the benchmark did nothing, if it printed one."""
        reason = re.search(r"^skipped +(.*)$", self.stdout, re.MULTILINE)
        return reason[1] if reason else None

    @property
    def state(self) -> str:
        if self.cut_off:
            return "cut off"
        if self.code:
            return f"failed with {self.code}"
        return "skipped" if self.skipped else "done"


def chosen(only: Sequence[str], *, rival: bool, benches: Sequence[Bench] = BENCHES) -> Iterator[Bench]:
    """Yield the selected benchmarks.  Those that need a rival are left out without one."""
    for bench in benches:
        if (not only or bench.name in only) and (rival or not bench.needs_rival):
            yield bench


async def run(bench: Bench, settings: Settings, on_line: Callable[[str], None], limit_s: float = math.inf) -> Outcome:
    """Run a benchmark to its end, with its output in a file.  If cancelled, stops it and lets it clean up.

    Args:
        on_line: called with the latest line of its output.
        limit_s: how long it may take before it is stopped.
    """
    import trio

    command = settings.command(bench)
    if bench.perf_log:
        (settings.out / PERF_LOG).unlink(missing_ok=True)
    began, code, stdout, stderr = time.monotonic(), 0, bytearray(), bytearray()

    async def read(stream: trio.abc.ReceiveStream, into: bytearray, file: BinaryIO) -> None:
        async for data in stream:
            into += data
            file.write(data)
            file.flush()
            on_line(into.decode(errors="replace").rstrip().rpartition("\n")[2])

    with (settings.out / f"{bench.name}.txt").open("wb") as file, trio.move_on_after(limit_s) as scope:
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                functools.partial(
                    trio.run_process,
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    check=False,
                    deliver_cancel=_terminate,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )
            )
            assert process.stdout is not None
            assert process.stderr is not None
            nursery.start_soon(read, process.stdout, stdout, file)
            nursery.start_soon(read, process.stderr, stderr, file)
        code = process.returncode or 0
    return Outcome(
        bench=bench,
        command=command,
        code=code,
        duration_s=time.monotonic() - began,
        stdout=stdout.decode(errors="replace"),
        stderr=stderr.decode(errors="replace"),
        cut_off=scope.cancelled_caught,
    )


async def _terminate(process: trio.Process) -> None:
    """Send SIGTERM, so that the benchmark stops its servers, and kill it only if it does not end."""
    import trio

    process.terminate()
    await trio.sleep(STOP_S)
    process.kill()
