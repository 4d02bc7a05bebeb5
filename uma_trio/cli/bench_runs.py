"""The benches that ``uma-trio bench`` runs: which, with what arguments, and what became of each."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    import trio

PERF_LOG: Final = "perf.jsonl"
STOP_S: Final = 15.0
"""For a bench to stop its servers."""


@attrs.frozen(kw_only=True)
class Bench:
    """One script with its arguments."""

    name: str
    title: str
    about: str
    """What it asks, for the report."""
    script: str
    full: str = ""
    """Arguments."""
    quick: str
    rival: tuple[str, str] | None = ("--rival", "--no-rival")
    """Arguments with llama-server and without; ``None``: there is no rival to it."""
    embedded: bool = False
    """Takes the embedded model, whatever the others take."""
    needs_rival: bool = False
    csv: bool = True
    draws: bool = False
    perf_log: bool = False
    """Its daemon writes one."""


BENCHES: Final = (
    Bench(
        name="mixed", title="Short streams beside a long prompt", script="mixed_load.py",
        about="Three interactive streams talk, then a long prompt arrives. Does anybody freeze?",
        full="--tokens 400", quick="--tokens 120 --long-words 500 --long-after 20", rival=None, perf_log=True,
    ),
    Bench(
        name="pareto", title="Wall time against p99", script="mixed_load.py",
        about="The same load at several settings of both servers: is any setting of the rival better in both?",
        full="--long 5 --repeat 3",
        quick="--tokens 100 --long 2 --long-words 400 --long-after 20 --rival-batch 2048,64 --ours '--target-tbt-ms 60' --ours '--target-tbt-ms 200'",
        rival=("--rival llama-server", ""), needs_rival=True, draws=True,
    ),
    Bench(
        name="throughput", title="Plain streams", script="throughput.py",
        about="Tokens a second of streams that all start together.",
        full="--streams 1,4,8,32 --repeat 3", quick="--streams 1,4 --tokens 64", rival=("--rivals", "--no-rivals"),
    ),
    Bench(
        name="goodput", title="Requests served well, against how many come", script="goodput.py",
        about="Poisson arrivals of short chats and some long prompts. Good is a first token within 1 s and a p99 time between tokens of at most 100 ms.",
        quick="--seconds 6 --drain 3", draws=True,
    ),
    Bench(
        name="overload", title="Twice of what the server can do", script="goodput.py",
        about="Do admitted requests keep their SLO, how soon are the others refused, does memory grow?",
        full="--overload 2", quick="--overload 2 --seconds 6 --overload-s 10 --drain 3",
    ),
    Bench(
        name="tenants", title="Two users of unequal size", script="goodput.py",
        about="One user with three times as many clients as the other: each should be given half. Needs root.",
        full="--tenants --seconds 90", quick="--tenants --seconds 20", rival=None, csv=False,
    ),
    Bench(
        name="long_ctx", title="Tokens a second against context", script="long_ctx.py",
        about="Decode speed of one stream as its context grows.",
        quick="--contexts 512,1024,2048 --tokens 32 --repeat 1", draws=True,
    ),
    Bench(
        name="ipc", title="What handing tokens over costs", script="ipc_overhead.py",
        about="Unix socket with JSON and with CBOR, and HTTP with server-sent events. With the embedded model, since the smaller the model, the more it shows.",
        quick="--requests 10 --tokens 150 --repeat 1", embedded=True,
    ),
    Bench(
        name="cancel", title="Cancel means now", script="cancel.py",
        about="From a cancel until the next in line has its first token, where there is one sequence.",
        quick="--repeat 4 --long-tokens 1000",
    ),
    Bench(
        name="fanout", title="Requests that begin alike", script="fanout.py",
        about="Eight requests with 2,000 tokens in common arrive together: how often are those computed?",
        quick="--requests 4 --prefix-tokens 400",
    ),
    Bench(
        name="sessions", title="Conversations that come back", script="sessions.py",
        about="The first token of a session's next turn: in the cache, and read from disk by a server that was started anew.",
        quick="--tokens 1000 --repeat 2", rival=None,
    ),
    Bench(
        name="churn", title="More conversations than there is room for", script="sessions.py",
        about="Five hundred sessions in room for twenty, an hour compressed: is anything lost, does memory stay in its bounds, how long does a copy hold up the others?",
        full="--churn", quick="--churn --sessions 30 --room 5 --turns 3 --hour 0.005", rival=None,
    ),
    Bench(
        name="lookup", title="Guessing tokens from what was said", script="lookup.py",
        about="Prompt lookup where answers copy, and where they do not. With the embedded model, which can do both.",
        quick="--questions 1 --tokens 300 --repeat 1",
        rival=("--rival-flags '-fa off' --rival-flags '-fa off --spec-type ngram-simple'", ""), embedded=True,
    ),
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Settings:
    """What all of them are told alike."""

    folder: Path
    """Where the scripts are."""
    out: Path
    quick: bool
    rival: bool
    model: Path | None
    """``None``: the embedded one."""
    threads: int | None
    draws: bool
    """matplotlib is there."""

    def command(self, bench: Bench) -> list[str]:
        found = [
            sys.executable,
            str(self.folder / bench.script),
            *shlex.split(bench.quick if self.quick else bench.full),
        ]
        if bench.rival is not None:
            found += shlex.split(bench.rival[0 if self.rival else 1])
        if self.model is not None and not bench.embedded:
            found += ["--model", str(self.model)]
        if self.threads is not None:
            found += ["--threads", str(self.threads)]
        if bench.csv:
            found += ["--csv", str(self.out / f"{bench.name}.csv")]
        if bench.draws and self.draws:
            found += ["--plot", str(self.out / f"{bench.name}.png")]
        if bench.name == "long_ctx":
            found += ["--csv-all", str(self.out / "long_ctx_all.csv")]
        if bench.perf_log:
            found += ["--", "--perf-log", str(self.out / PERF_LOG)]
        return found


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of one."""

    bench: Bench
    command: list[str]
    code: int
    """Its exit code."""
    took_s: float
    said: str
    complained: str

    @property
    def skipped(self) -> str | None:
        """Why it did nothing, if it said so."""
        found = re.search(r"^skipped +(.*)$", self.said, re.MULTILINE)
        return found[1] if found else None

    @property
    def state(self) -> str:
        if self.code:
            return f"failed with {self.code}"
        return "skipped" if self.skipped else "done"


def chosen(only: Sequence[str], *, rival: bool) -> Iterator[Bench]:
    """In their order; those that are nothing without a rival only with one."""
    for bench in BENCHES:
        if (not only or bench.name in only) and (rival or not bench.needs_rival):
            yield bench


async def run(bench: Bench, settings: Settings, on_line: Callable[[str], None]) -> Outcome:
    """To its end; what it prints is also kept in a file.  Cancelled, it is asked to stop, and cleans up.

    Args:
        on_line: told the last line that it has printed.
    """
    import trio

    command = settings.command(bench)
    if bench.perf_log:
        (settings.out / PERF_LOG).unlink(missing_ok=True)
    began, said, complained = time.monotonic(), bytearray(), bytearray()

    async def read(stream: trio.abc.ReceiveStream, into: bytearray) -> None:
        async for data in stream:
            into += data
            on_line(into.decode(errors="replace").rstrip().rpartition("\n")[2])

    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            functools.partial(
                trio.run_process,
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                check=False,
                deliver_cancel=_ask_to_stop,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        )
        assert process.stdout is not None
        assert process.stderr is not None
        nursery.start_soon(read, process.stdout, said)
        nursery.start_soon(read, process.stderr, complained)
    outcome = Outcome(
        bench=bench,
        command=command,
        code=process.returncode or 0,
        took_s=time.monotonic() - began,
        said=said.decode(errors="replace"),
        complained=complained.decode(errors="replace"),
    )
    await trio.Path(settings.out / f"{bench.name}.txt").write_text(outcome.said + outcome.complained)
    return outcome


async def _ask_to_stop(process: trio.Process) -> None:
    """It stops the servers that it has started; only one that does not is killed."""
    import trio

    process.terminate()
    await trio.sleep(STOP_S)
    process.kill()
