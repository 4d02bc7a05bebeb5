"""Measure the cost of transport: a Unix socket with JSON or CBOR, and HTTP with server-sent events.

python benches/ipc_overhead.py --csv ipc.csv
python benches/ipc_overhead.py --streams 32 --tokens 500 --repeat 5
python benches/ipc_overhead.py --no-rival
"""

from __future__ import annotations

import contextlib
import random
import shlex
import statistics
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, places, repeat_option, rival_option, show_rival
from comparison import RunsFile, medians
from llama_http import LlamaServer
from measure import Result, measure, stream, warm_up
from pinning import pinned
from report import cell, table
from rigs import Protocol, Rig, ServerSettings, llama_server_rig, peers_option, room, uma_trio_flags, uma_trio_rig

from uma_trio.client import Client
from uma_trio.demo import load
from uma_trio.demo.recording import Question
from uma_trio.protocol.payload import Encoding

WORDS = 8
"""Words of a prompt.  They are few, so that prefill is short."""


@attrs.define
class Traffic:
    """Bytes on all connections, in both directions."""

    n_bytes: int = 0


class Counted(trio.abc.Stream):
    """A trio stream that counts bytes."""

    def __init__(self, inner: trio.abc.Stream, traffic: Traffic) -> None:
        self._inner, self._traffic = inner, traffic

    async def send_all(self, data: Any) -> None:
        self._traffic.n_bytes += len(data)
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._inner.receive_some(max_bytes)
        self._traffic.n_bytes += len(data)
        return data

    async def aclose(self) -> None:
        await self._inner.aclose()


class CountedBytes(anyio.abc.ByteStream):
    """An anyio stream that counts bytes, for the client."""

    def __init__(self, inner: anyio.abc.ByteStream, traffic: Traffic) -> None:
        self._inner, self._traffic = inner, traffic

    async def send(self, item: bytes) -> None:
        await self._inner.send(item)

    async def send_eof(self) -> None:
        await self._inner.send_eof()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._inner.receive(max_bytes)
        self._traffic.n_bytes += len(data)
        return data

    async def aclose(self) -> None:
        await self._inner.aclose()


@attrs.frozen(kw_only=True)
class CountedDaemon(load.Daemon):
    """uma-trio with counted bytes."""

    traffic: Traffic

    @contextlib.asynccontextmanager
    async def connect(self, *, interactive: bool) -> AsyncIterator[load.Connection]:
        async with await anyio.connect_unix(self.path) as stream:
            counted = CountedBytes(stream, self.traffic)
            yield self.over(Client(counted, encoding=Encoding(self.encoding)), interactive=interactive)


@attrs.frozen(kw_only=True)
class CountedLlamaServer(LlamaServer):
    """llama-server with counted bytes."""

    traffic: Traffic

    async def open(self) -> trio.abc.Stream:
        return Counted(await super().open(), self.traffic)


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several."""

    ttft_ms: float
    """Median of short requests one after another, including the connection."""
    cpu_pct: float
    """Processor time of server and load generator while all streams run, in percent of one core."""
    tokens_per_s: float
    server_us: float
    """Processor time for each token, its computation included."""
    client_us: float
    bytes_per_token: float
    """In both directions, including the requests."""
    others_cpu: float

    @classmethod
    def of(cls, ttft_ms: float, streams: Result, n_bytes: int) -> Figures:
        cpu, n = streams.cpu, streams.n_tokens
        server = cpu.server or 0.0
        return cls(
            ttft_ms=ttft_ms,
            cpu_pct=100 * (server + cpu.generator) / streams.wall_s,
            tokens_per_s=streams.tokens_per_s,
            server_us=1e6 * server / n,
            client_us=1e6 * cpu.generator / n,
            bytes_per_token=n_bytes / n,
            others_cpu=cpu.others / streams.wall_s,
        )


@attrs.frozen(kw_only=True)
class RequestLoad:
    """The requests, which are the same for all transports."""

    requests: int
    streams: int
    tokens: int
    seed: int

    async def of(self, rig: Rig, place: Place) -> Figures:
        """Measure short requests one after another, then streams."""
        traffic = Traffic()
        counted = attrs.evolve(rig, transport=_counted(rig.transport, traffic))
        rng = random.Random(self.seed)
        await warm_up(counted)
        with pinned(rig.pid, place.pins):
            short = [
                await _ttft_ms(counted.transport, stream(rng, "short", WORDS, 1).questions[0])
                for _ in range(self.requests)
            ]
        before = traffic.n_bytes
        result = await measure(
            counted, [stream(rng, f"s{n}", WORDS, self.tokens) for n in range(self.streams)], pins=place.pins
        )
        for line in result.unfinished():
            click.echo(f"WARNING: {line}", err=True)
        return Figures.of(statistics.median(short), result, traffic.n_bytes - before)

    def __str__(self) -> str:
        return f"{self.requests} requests of 1 token, then {self.streams} x {self.tokens} tokens, seed {self.seed}"


def _counted(transport: load.Transport, traffic: Traffic) -> load.Transport:
    """The same transport with counted bytes, and without speculation, whose gain depends on the text."""
    if isinstance(transport, LlamaServer):
        return CountedLlamaServer(host=transport.host, port=transport.port, traffic=traffic)
    assert isinstance(transport, load.Daemon)
    return CountedDaemon(path=transport.path, encoding=transport.encoding, speculate=False, traffic=traffic)


async def _ttft_ms(transport: load.Transport, question: Question) -> float:
    began, came = trio.current_time(), []
    async with transport.connect(interactive=True) as connection:
        await connection.ask(question, lambda _: came.append(trio.current_time()))
    return 1e3 * (came[0] - began)


def show(figures: dict[str, Figures]) -> str:
    header = (
        "path",
        "TTFT ms",
        "cpu",
        "tok/s",
        "server us a token",
        "client us a token",
        "bytes a token",
        "others cpu",
    )
    lines = [
        [
            path, cell(f.ttft_ms, 2), f"{f.cpu_pct:.0f}%", cell(f.tokens_per_s), cell(f.server_us), cell(f.client_us),
            cell(f.bytes_per_token), f"{f.others_cpu:.0%}",
        ]
        for path, f in figures.items()
    ]  # fmt: skip
    return table(header, lines)


@bench()
@click.option(
    "--requests", type=click.IntRange(1), default=50, help="Requests of one token, one after another, for the TTFT."
)
@click.option("--streams", type=click.IntRange(1), default=8, help="Streams at the same time, for the other figures.")
@click.option("--tokens", type=click.IntRange(2), default=400, help="Tokens that each stream generates.")
@click.option("--seed", type=int, default=0, help="Seed of the words.")
@places()
@rival_option()
@click.option(
    "--rival-flags", default="-fa off", help="Flags of llama-server; by default it computes as uma-trio does on a CPU."
)
@peers_option()
@repeat_option(3, "Runs of each transport, alternating.")
@csv_option("path,ttft_ms,cpu_pct: the medians of each transport")
def main(repeat: int, csv_file: Path | None, **options: Any) -> None:
    """Compare transports with the same model and requests: uds-json, uds-cbor, http-sse.

    The first two are the Unix socket of uma-trio with framed JSON and CBOR; the last one is HTTP with server-sent
    events of llama-server. The smaller the model, the larger the share of transport; the embedded model has 7M
    parameters. Each request opens its own connection, which is part of the TTFT.

    \b
    cpu          processor time of server and load generator while all streams run, of one core
    server us    processor time of the server for each token; it includes the computation, so compare values only
    client us    the same of the load generator, which reads the answers of both servers in Python
    bytes        on the connections, in both directions, requests included

    uma-trio runs without speculation. Each run starts its server; the table has the medians of --repeat runs.
    """
    place = Place.of(options)
    asked = RequestLoad(**{field.name: options[field.name] for field in attrs.fields(RequestLoad)})
    place.show()

    async def work() -> dict[str, Figures]:
        serving = ServerSettings(
            model=place.model,
            threads=place.threads,
            parallel=asked.streams,
            ctx=asked.streams * room(WORDS, asked.tokens),
        )
        encodings: tuple[Protocol, ...] = ("json", "cbor")
        paths = {f"uds-{name}": partial(uma_trio_rig, uma_trio_flags(serving), protocol=name) for name in encodings}
        if options["rival"]:
            show_rival(options["peers"])
            paths["http-sse"] = partial(
                llama_server_rig, options["peers"], serving, shlex.split(options["rival_flags"])
            )
        click.echo(f"servers   {serving}\nload      {asked}\n")
        runs: dict[str, list[Figures]] = {path: [] for path in paths}
        for turn in range(1, repeat + 1):
            for path, rig in paths.items():
                async with rig() as started:
                    figures = await asked.of(started, place)
                runs[path].append(figures)
                click.echo(f"run {turn}  {path:<9} TTFT {figures.ttft_ms:.2f} ms, {figures.tokens_per_s:.1f} tok/s")
        return {path: medians(of_path) for path, of_path in runs.items()}

    figures = carry_out(work)
    click.echo(f"\n{show(figures)}")
    file = RunsFile(csv_file, ["path", "ttft_ms", "cpu_pct"])
    for path, of_path in figures.items():
        file.add(path, of_path.ttft_ms, of_path.cpu_pct)


if __name__ == "__main__":
    main()
