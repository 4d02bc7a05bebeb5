"""Measure one GPU in ten minutes: every load next to llama-server, with one library after another, and the goals.

python benches/one_gpu.py --model 7b.gguf --small 125m.gguf
python benches/one_gpu.py --model 7b.gguf --backend cuda=build/cuda-lib,build/cuda-peers/bin --backend vulkan=build/vulkan-lib,build/vulkan-peers/bin
python benches/one_gpu.py --quick --only schema
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import constrained
import trio
from command import Place, bench, carry_out, places
from comparison import US, Figures
from gateway_http import Gateway
from machine import machine
from measure import Result, measure, stream, warm_up
from mixed_load import Load
from report import cell, table
from rigs import (
    DEFAULT_PEERS,
    Rig,
    ServerSettings,
    llama_flags,
    llama_server_rig,
    peer,
    room,
    run_peer,
    uma_trio_flags,
    uma_trio_rig,
    without_speculation,
)
from throughput import decode_rate

from llama_abi.locations import DIRECTORY_VARIABLE, library_directory
from uma_trio.files import replace_text

SERVER: Final = "llama-server"
BENCH: Final = "llama-batched-bench"

DRIVER_CACHES: Final = ("__GL_SHADER_DISK_CACHE_PATH", "MESA_SHADER_CACHE_DIR", "XDG_CACHE_HOME")
"""Where drivers, and uma-trio, keep what they have compiled and measured."""

CELLS_OF_A_STREAM: Final = 1024


@attrs.frozen
class Backend:
    """A library, and llama.cpp's programs with it."""

    name: str
    library: Path
    peers: Path

    @classmethod
    def parse(cls, text: str) -> Backend:
        """
        Raises:
            ValueError: not NAME=LIBRARY,PEERS.
        """
        name, _, folders = text.partition("=")
        library, _, peers = folders.partition(",")
        if not (name and library and peers):
            raise ValueError(f"expected NAME=LIBRARY,PEERS, got {text!r}")
        return cls(name, Path(library).resolve(), Path(peers).resolve())


@attrs.frozen
class Row:
    """One line of the table: a figure of both, and the goal for their ratio."""

    backend: str
    work: str
    figure: str
    ours: float | None
    theirs: float | None
    most: float | None = None
    """Upper bound of ours / theirs."""
    least: float | None = None
    """Lower bound of it."""
    rival: str = SERVER

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.ours is not None and self.theirs else None

    @property
    def verdict(self) -> str:
        """Whether the goal is met; empty without a goal or a figure."""
        if self.ratio is None or (self.most is None and self.least is None):
            return ""
        met = (self.most is None or self.ratio <= self.most) and (self.least is None or self.ratio >= self.least)
        return "yes" if met else "no"

    @property
    def goal(self) -> str:
        bounds = [f"at most {self.most:g}"] if self.most is not None else []
        return ", ".join(bounds + ([f"at least {self.least:g}"] if self.least is not None else []))


def show(rows: Sequence[Row]) -> str:
    """The Markdown table."""
    header = ("backend", "work", "figure", "rival", "theirs", "ours", "ratio", "goal", "met")
    return table(
        header,
        [
            [row.backend, row.work, row.figure, row.rival, cell(row.theirs), cell(row.ours), cell(row.ratio, 2), row.goal, row.verdict]
            for row in rows
        ],
    )  # fmt: skip


@attrs.frozen(kw_only=True)
class Sizes:
    """How much each load has."""

    load: Load
    streams: Sequence[int]
    tokens: int
    small_streams: Sequence[int]
    small_runs: int
    schema_streams: int


WHOLE: Final = Sizes(
    load=Load(streams=8, tokens=400, long=6, long_words=4000, long_tokens=64, long_after=50, long_every=0.3, seed=0),
    streams=(32, 64, 128),
    tokens=256,
    small_streams=(1, 8, 32, 128),
    small_runs=7,
    schema_streams=32,
)
QUICK: Final = Sizes(
    load=Load(streams=2, tokens=40, long=1, long_words=60, long_tokens=8, long_after=5, long_every=0.0, seed=0),
    streams=(2,),
    tokens=16,
    small_streams=(1, 2),
    small_runs=1,
    schema_streams=2,
)

GOALS: Final[Mapping[str, Mapping[str, tuple[float, float, float]]]] = {
    "cuda": {"": (1 / 4, 1.00, 1.5), "--target-itl-ms 30": (1 / 6, 1.04, 0.0), "--target-itl-ms 18": (1 / 9, 1.10, 0.0)},
    "vulkan": {"": (1 / 5, 1.10, 0.0), "--target-itl-ms 30": (0.0, 0.0, 0.0), "--target-itl-ms 18": (0.0, 0.0, 0.0)},
}  # fmt: skip
"""The mixed load, by setting of ours: bounds of the ratios of p99, of wall time, and of the TTFT of long prompts; 0: no goal."""


@attrs.frozen(kw_only=True)
class Bench:
    """What all loads need."""

    backend: Backend
    place: Place
    small: Path
    sizes: Sizes
    rival_flags: Sequence[str]

    def serving(self, parallel: int, ctx: int, model: Path | None = None) -> ServerSettings:
        return ServerSettings(model=model or self.place.model, threads=self.place.threads, parallel=parallel, ctx=ctx)

    def ours(self, serving: ServerSettings, *flags: str, http: bool = False) -> Any:
        return uma_trio_rig([*uma_trio_flags(serving), *flags], protocol="http" if http else "json")

    def theirs(self, serving: ServerSettings) -> Any:
        return llama_server_rig(self.backend.peers, serving, self.rival_flags)

    async def plain(self, rig: Rig, n: int) -> Result:
        """``n`` streams that start together, with short prompts."""
        rng = random.Random(n)
        streams = [stream(rng, f"s{k}", 32, self.sizes.tokens) for k in range(n)]
        return await measure(without_speculation(rig), streams, pins=self.place.pins)

    def row(self, work: str, figure: str, ours: float | None, theirs: float | None, **goal: Any) -> Row:
        return Row(self.backend.name, work, figure, ours, theirs, **goal)

    # -- the loads ----------------------------------------------------------------------------

    async def mixed(self) -> list[Row]:
        """Streams next to long prompts, with three targets of ours."""
        rows: list[Row] = []
        load = self.sizes.load
        serving = self.serving(load.parallel, load.parallel * load.room)

        async def run(rig: Any) -> Figures:
            async with rig as started:
                await warm_up(started)
                made = load.make()
                return Figures.of(
                    await measure(
                        started, made, head_start=load.long_after, every_s=load.long_every, pins=self.place.pins
                    )
                )

        theirs = await run(self.theirs(serving))
        for setting, (p99, wall, ttft) in GOALS.get(self.backend.name, GOALS["cuda"]).items():
            ours = await run(self.ours(serving, *setting.split()))
            work = f"mixed load {setting}".strip()
            rows += [
                self.row(work, "p99 ms", ours.itl_p99_ms, theirs.itl_p99_ms, most=p99 or None),
                self.row(work, "wall s", ours.wall_s, theirs.wall_s, most=wall or None),
                self.row(work, "TTFT of the long, ms", ours.ttft_p50_ms, theirs.ttft_p50_ms, most=ttft or None),
                self.row(work, "longest gap ms", ours.itl_max_ms, theirs.itl_max_ms),
            ]
        return rows

    async def first_start(self) -> list[Row]:
        """The mixed load with drivers that have compiled nothing yet."""
        load = self.sizes.load
        serving = self.serving(load.parallel, load.parallel * load.room)
        figures: dict[str, Figures] = {}
        start_s: dict[str, float] = {}
        for name, rig in ((SERVER, self.theirs(serving)), (US, self.ours(serving))):
            with empty_caches():
                began = time.perf_counter()
                async with rig as started:
                    start_s[name] = time.perf_counter() - began
                    result = await measure(
                        started, load.make(), head_start=load.long_after, every_s=load.long_every, pins=self.place.pins
                    )
            figures[name] = Figures.of(result)
        ours, theirs = figures[US], figures[SERVER]
        work = "first start, mixed load"
        return [
            self.row(work, "longest gap ms", ours.itl_max_ms, theirs.itl_max_ms, most=1 / 20),
            self.row(work, "wall s", ours.wall_s, theirs.wall_s),
            self.row(work, "start s", start_s[US], start_s[SERVER]),
        ]

    async def streams(self) -> list[Row]:
        """Plain streams with ``ctx`` set, by socket and HTTP, next to llama-server and to the library alone."""
        rows: list[Row] = []
        alone = await self._batched_bench()
        for n in self.sizes.streams:
            serving = self.serving(n, n * CELLS_OF_A_STREAM)
            ours = {}
            async with self.ours(serving, http=True) as rig:
                await warm_up(rig)
                for door, door_rig in doors(rig).items():
                    ours[door] = decode_rate((await self.plain(door_rig, n)).tracks)
            async with self.theirs(serving) as rig:
                await warm_up(rig)
                theirs = decode_rate((await self.plain(rig, n)).tracks)
            for door, rate in ours.items():
                least = 1.3 if self.backend.name == "vulkan" else None
                rows.append(self.row(f"{n} streams, {door}", "decode tok/s", rate, theirs, least=least))
                rows.append(
                    self.row(f"{n} streams, {door}", "decode tok/s", rate, alone.get(n), least=0.95, rival=BENCH)
                )
        return rows

    async def _batched_bench(self) -> dict[int, float]:
        """Tokens a second of the library alone, by streams."""
        most = max(self.sizes.streams)
        counts = ",".join(map(str, self.sizes.streams))
        arguments = [
            *llama_flags(self.serving(most, most * CELLS_OF_A_STREAM)), "-npp", "40", "-ntg", str(self.sizes.tokens), "-npl", counts,
            "--output-format", "jsonl", *self.rival_flags,
        ]  # fmt: skip
        output = await run_peer(peer(self.backend.peers, BENCH), arguments)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return {line["pl"]: line["speed_tg"] for line in lines}

    async def small_model(self) -> list[Row]:
        """A small model, where the host decides: over HTTP next to llama-server and to our own socket.

        One run takes a fraction of a second, so each figure is the median of some.
        """

        async def speed(rig: Rig, n: int) -> float:
            return statistics.median([(await self.plain(rig, n)).tokens_per_s for _ in range(self.sizes.small_runs)])

        most = max(self.sizes.small_streams)
        serving = self.serving(most, most * CELLS_OF_A_STREAM, self.small)
        ours: dict[tuple[int, str], float] = {}
        async with self.ours(serving, http=True) as rig:
            await warm_up(rig)
            for n in self.sizes.small_streams:
                for door, door_rig in doors(rig).items():
                    ours[n, door] = await speed(door_rig, n)
        theirs = {}
        async with self.theirs(serving) as rig:
            await warm_up(rig)
            for n in self.sizes.small_streams:
                theirs[n] = await speed(rig, n)
        rows = []
        for n in self.sizes.small_streams:
            work, by_http = f"small model, {n} streams, HTTP", ours[n, "HTTP"]
            rows.append(self.row(work, "tok/s", by_http, theirs[n], least=0.95 if n == 1 else None))
            rows.append(self.row(work, "tok/s", by_http, ours[n, "socket"], least=0.95, rival="our socket"))
        return rows

    async def schema(self) -> list[Row]:
        """Streams under one JSON schema, next to the same without, and next to llama-server."""
        n = self.sizes.schema_streams
        serving = self.serving(n, n * room(constrained.PROMPT_WORDS, self.sizes.tokens))
        schema, pins = constrained.SCHEMAS["strings"], self.place.pins
        rates: dict[tuple[str, bool], float] = {}
        first: list[float] = []
        for name, rig in ((US, self.ours(serving)), (SERVER, self.theirs(serving))):
            async with rig as started:
                await warm_up(started)
                plain_rig = without_speculation(started)
                for with_schema in (True, False):
                    figures = await constrained.run(
                        plain_rig, n, self.sizes.tokens, schema if with_schema else None, pins
                    )
                    rates[name, with_schema] = figures.tokens_per_s
                if name == US:
                    first = await self._first_tokens(started)
        work = f"{n} streams under a schema"
        plain = "ours without"
        return [
            self.row(work, "decode tok/s", rates[US, True], rates[US, False], least=0.95, rival=plain),
            self.row(work, "decode tok/s", rates[US, True], rates[SERVER, True]),
            self.row("a schema that is known", "TTFT ms", *first, most=1.1, rival=plain),
        ]

    async def _first_tokens(self, rig: Rig) -> list[float]:
        """Medians of the time to the first token, with a schema that was used before and without one."""
        again, without = [], []
        for _ in range(5):
            [[_, _, with_schema, plain]] = await constrained.first_tokens(rig.transport, [50])
            again.append(float(with_schema.replace(",", "")))
            without.append(float(plain.replace(",", "")))
        return [sorted(again)[2], sorted(without)[2]]


LOADS: Final[Mapping[str, Callable[[Bench], Awaitable[list[Row]]]]] = {
    "first-start": Bench.first_start,
    "mixed": Bench.mixed,
    "streams": Bench.streams,
    "schema": Bench.schema,
    "small": Bench.small_model,
}
"""In this order for each backend.  The first one is for backends that compile while they serve."""


def doors(rig: Rig) -> dict[str, Rig]:
    """The ways into one daemon."""
    assert isinstance(rig.transport, Gateway)
    return {"socket": attrs.evolve(rig, transport=rig.transport.daemon), "HTTP": rig}


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have the servers that start meanwhile get these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Have the servers that start meanwhile find nothing that was compiled or measured before."""
    with tempfile.TemporaryDirectory(prefix="cache-") as folder, environment(dict.fromkeys(DRIVER_CACHES, folder)):
        yield


async def measured(benches: Sequence[Bench], only: Sequence[str], ends: float) -> AsyncIterator[tuple[str, list[Row]]]:
    """The rows of one load after another; what is not done at ``ends`` is left out."""
    for of_backend in benches:
        with environment({DIRECTORY_VARIABLE: str(of_backend.backend.library)}):
            for name, load in LOADS.items():
                if (only and name not in only) or (name == "first-start" and of_backend.backend.name != "vulkan"):
                    continue
                began = time.perf_counter()
                rows: list[Row] = []
                with trio.move_on_after(max(0.0, ends - began)) as scope:
                    rows = await load(of_backend)
                state = "the time is over" if scope.cancelled_caught else f"{time.perf_counter() - began:.0f} s"
                yield f"{of_backend.backend.name}, {name}: {state}", rows


@bench()
@click.option("--small", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="GGUF file of a small model.  [default: --model]")  # fmt: skip
@click.option("--backend", "backends", multiple=True, help="NAME=LIBRARY,PEERS: a library, and the folder of llama.cpp's programs that use it; repeatable.  [default: the library in use, and build/peers/bin]")  # fmt: skip
@click.option("--only", type=click.Choice([*LOADS]), multiple=True, help="Measure this alone; repeatable.")
@click.option("--minutes", type=click.FloatRange(0), default=9.5, help="Begin and finish nothing after so long.")
@click.option("--rival-flags", default="-ngl 999", help="Flags of llama-server and llama-batched-bench.")
@click.option("--quick", is_flag=True, help="Tiny loads, to try the script.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows as JSON, after each load.")
@places()
def main(**options: Any) -> None:
    """Measure the loads of the goals, each next to llama-server, with one library after another.

    Prints a Markdown table: figures of both, their ratio, and whether it meets its goal.  A backend that is called
    vulkan also starts once with empty caches of the driver.
    """
    began = time.perf_counter()
    try:
        backends = [Backend.parse(text) for text in options["backends"]]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--backend") from None
    place = Place.of(options)
    benches = [
        Bench(
            backend=backend,
            place=place,
            small=options["small"] or place.model,
            sizes=QUICK if options["quick"] else WHOLE,
            rival_flags=options["rival_flags"].split(),
        )
        for backend in backends or [Backend("cuda", library_directory(), DEFAULT_PEERS)]
    ]
    for line in [*machine(), f"pin       {place.pins or 'none'}"]:
        click.echo(line)
    rows: list[Row] = []

    async def work() -> None:
        async for done, new_rows in measured(benches, options["only"], began + 60 * options["minutes"]):
            rows.extend(new_rows)
            click.echo(done)
            if options["out"] is not None:
                replace_text(options["out"], json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n")

    try:
        carry_out(work)
    finally:
        click.echo(f"\n{show(rows)}")


if __name__ == "__main__":
    main()
