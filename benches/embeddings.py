"""Measure embeddings: texts a second, by the socket and by HTTP, next to llama-server.

python benches/embeddings.py
python benches/embeddings.py --threads 1 --texts 300 --clients 4 --batch 1 --batch 10
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np
import numpy.typing as npt
import trio
from command import Place, bench, carry_out, csv_option, places, repeat_option, show_rival
from comparison import RunsFile
from gateway_http import Gateway
from llama_http import LlamaServer
from pinning import pinned
from report import cell, table
from rigs import Rig, ServerSettings, llama_server_rig, peers_option, uma_trio_flags, uma_trio_rig

from uma_trio.client import open_client
from uma_trio.demo.load import Daemon

try:
    import httpx
except ModuleNotFoundError:
    sys.exit("embeddings.py needs the package httpx, which the extra dev installs: run ./build_llama.sh --dev")

TIMEOUT_S = 300.0
WAYS = ("llama-server", "uma-trio, HTTP", "uma-trio, socket")

Tokens = list[int]
Vectors = dict[int, npt.NDArray[np.float64]]
"""By the number of the text."""


@attrs.frozen(kw_only=True)
class Load:
    """Texts, which so many clients send in requests of so many texts, each client one request after another."""

    texts: Sequence[Tokens]
    clients: int
    batch: int

    def requests(self) -> list[list[int]]:
        """The numbers of the texts of each request."""
        return [list(range(at, min(at + self.batch, len(self.texts)))) for at in range(0, len(self.texts), self.batch)]


def random_texts(n: int, length: int, seed: int) -> list[Tokens]:
    """Tokens that every vocabulary has and that control nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(300, 1500) for _ in range(length)] for _ in range(n)]


async def by_http(host: str, port: int, model: str, load: Load) -> tuple[float, Vectors]:
    """Seconds for all texts by ``/v1/embeddings``, and their vectors."""
    vectors: Vectors = {}
    waiting = iter(load.requests())
    limits = httpx.Limits(max_connections=load.clients, keepalive_expiry=4.0)
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=TIMEOUT_S, limits=limits) as http:

        async def client() -> None:
            for numbers in waiting:
                answer = await http.post(
                    "/v1/embeddings", json={"model": model, "input": [load.texts[at] for at in numbers]}
                )
                answer.raise_for_status()
                for row in answer.json()["data"]:
                    vectors[numbers[row["index"]]] = np.array(row["embedding"])

        began = time.perf_counter()
        await _together(client, load.clients)
        return time.perf_counter() - began, vectors


async def by_socket(path: str, load: Load) -> tuple[float, Vectors]:
    """Seconds for all texts by the daemon's socket, and their vectors."""
    vectors: Vectors = {}
    waiting = iter(load.requests())

    async def client() -> None:
        async with open_client(path) as connected:
            for numbers in waiting:
                answer = await connected.embed([load.texts[at] for at in numbers], keep_alive=True)
                for at, vector in zip(numbers, answer.embeddings, strict=True):
                    vectors[at] = np.array(vector)

    began = time.perf_counter()
    await _together(client, load.clients)
    return time.perf_counter() - began, vectors


async def _together(client: Any, n: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(n):
            nursery.start_soon(client)


async def run(rig: Rig, way: str, load: Load, place: Place) -> tuple[float, Vectors]:
    with pinned(rig.pid, place.pins):
        match rig.transport:
            case LlamaServer(host=host, port=port):
                return await by_http(host, port, place.model.stem, load)
            case Gateway(host=host, port=port):
                return await by_http(host, port, place.model.stem, load)
            case Daemon(path=path):
                return await by_socket(str(path), load)
    raise AssertionError(way)


def started(way: str, serving: ServerSettings, peers: Path) -> AbstractAsyncContextManager[Rig]:
    """A server that runs until the context ends."""
    match way:
        case "llama-server":
            return llama_server_rig(peers, serving, ["--embedding", "--pooling", "mean", "-b", "2048", "-ub", "2048"])
        case "uma-trio, HTTP":
            return uma_trio_rig(uma_trio_flags(serving), protocol="http")
        case _:
            return uma_trio_rig(uma_trio_flags(serving), protocol="cbor")


def distance(vectors: Vectors, others: Vectors) -> float:
    """The largest difference of two components."""
    return max(float(np.abs(vectors[at] - others[at]).max()) for at in others)


@bench()
@click.option("--texts", "n_texts", type=click.IntRange(1), default=1000, help="Texts to embed.")
@click.option("--length", type=click.IntRange(1), default=100, help="Tokens of each text.")
@click.option("--clients", type=click.IntRange(1), default=8, help="Clients at the same time.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=[1, 10], help="Texts of a request; repeatable.")  # fmt: skip
@places()
@peers_option()
@repeat_option(3)
@csv_option("a row for each run")
def main(repeat: int, csv_file: Path | None, n_texts: int, length: int, clients: int, batches: Sequence[int], **options: Any) -> None:  # fmt: skip
    """Measure how long texts take to embed, and compare the vectors with those of llama-server.

    All servers have the same model file, threads and clients. Runs alternate, and each starts its server; the table has
    the fastest of --repeat runs.
    """
    place = Place.of(options)
    place.show()
    show_rival(options["peers"])

    async def work() -> str:
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=clients, ctx=clients * 2048)
        click.echo(f"servers   {serving}\nload      {n_texts} texts of {length} tokens, {clients} clients\n")
        texts = random_texts(n_texts, length, 1)
        seconds: dict[tuple[str, int], list[float]] = {}
        expected: Vectors = {}
        differs: dict[str, float] = {}
        file = RunsFile(csv_file, ["run", "way", "batch", "seconds"])
        for at, way in itertools.product(range(repeat), WAYS):
            async with started(way, serving, options["peers"]) as server:
                await run(server, way, Load(texts=texts[: 2 * clients], clients=clients, batch=1), place)
                for batch in batches:
                    load = Load(texts=texts, clients=clients, batch=batch)
                    took_s, vectors = await run(server, way, load, place)
                    expected = expected or vectors
                    differs[way] = max(distance(vectors, expected), differs.get(way, 0.0))
                    seconds.setdefault((way, batch), []).append(took_s)
                    file.add(at + 1, way, batch, took_s)
                    click.echo(f"run {at + 1}  {way:<18} {batch:>3} texts a request  {n_texts / took_s:.0f} texts/s")
        best = {key: min(runs) for key, runs in seconds.items()}
        header = ("server", "texts a request", "s", "texts/s", "ratio", "largest difference")
        return table(
            header,
            [
                [
                    way,
                    str(batch),
                    cell(s, 2),
                    cell(n_texts / s),
                    cell(best[WAYS[0], batch] / s, 2),
                    f"{differs[way]:.1e}",
                ]
                for (way, batch), s in sorted(best.items(), key=lambda pair: pair[0][1])
            ],
        )

    click.echo(f"\n{carry_out(work)}")


if __name__ == "__main__":
    main()
