"""Measure streams of text while pictures arrive, over HTTP: uma-trio next to llama-server.

python benches/pictures.py --threads 1
python benches/pictures.py --model 7b.gguf --shape clip-l --threads 1 --pin 0-2:3 --rival-flags "-ngl 999"
"""

from __future__ import annotations

import base64
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import attrs
import click
import contenders
import httpx2
import msgspec
import trio
from command import Place, bench, carry_out, csv_option, places, repeat_option, rival_option, show_rival
from comparison import Contender, RunsFile, medians, ratio
from gateway_http import Gateway
from llama_http import LlamaServer
from make_projector import SHAPES, make_projector
from measure import pinned
from processes import cpu_s
from random_pictures import random_picture
from report import cell as number
from report import table
from rigs import Rig, ServerSettings, peers_option

from uma_trio.demo.recording import percentile

FIRST_TOKENS: Final = 5
"""Tokens of every stream before the first picture comes."""
ANSWER_TOKENS: Final = 8
"""Tokens of an answer about a picture."""
PROMPT_TOKENS: Final = 256
"""Room for the text of a prompt."""


@attrs.frozen(kw_only=True)
class Load:
    """The requests of a run."""

    streams: int
    tokens: int
    """Length of each stream."""
    pictures: int
    side: int
    """Pixels of a picture."""
    every_s: float

    def picture(self, seed: int) -> str:
        """A data URL with a picture of its own."""
        return f"data:image/png;base64,{base64.b64encode(random_picture(seed, self.side)).decode()}"


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several."""

    wall_s: float
    gap_p50_ms: float | None
    """Between two events of a stream of text, from the first picture on; likewise the next two."""
    gap_p99_ms: float | None
    gap_max_ms: float | None
    first_ms: float
    """From a request about a picture to its first token, mean."""
    last_ms: float
    """From the first request about a picture to the end of the last one."""
    cpu_s: float
    """Processor time of the server's processes, up to there."""
    alone_ms: float
    """From a request about a new picture to its first token, afterwards, when nothing else runs."""
    again_ms: float
    """The same for a second question about that picture."""


NAMES: Final = [field.name for field in attrs.fields(Figures)]


async def token_times(url: str, content: Any, tokens: int) -> AsyncIterator[float]:
    """Ask for an answer, and yield when its texts come.

    Raises:
        click.ClickException: the server refuses.
    """
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with (
        httpx2.AsyncClient(timeout=None, verify=False) as client,  # reading certificates would stop all streams
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        if answer.status_code != httpx2.codes.OK:
            raise click.ClickException(f"{url} answers {(await answer.aread()).decode()[:500]}")
        async with aclosing(answer.aiter_bytes()) as parts:
            rest = b""  # aiter_lines would also end a line at U+2028 within a text
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        event = msgspec.json.decode(line.removeprefix(b"data: "))
                        if event.get("choices") and event["choices"][0]["delta"].get("content"):
                            yield time.perf_counter()


async def run(url: str, load: Load, seed: int, pid: int) -> Figures:
    """Start the streams, then send the pictures, and wait for all answers."""
    words = random.Random(seed)
    began, used_s = time.perf_counter(), cpu_s(pid)
    running: list[list[float]] = [[] for _ in range(load.streams)]
    ready = trio.Event()
    firsts: list[float] = []
    lasts: list[float] = []

    starting = {*range(load.streams)}

    async def text(n: int) -> None:
        prompt = f"Tell a story about number {words.randrange(10**6)}."
        async for at in token_times(url, prompt, load.tokens):
            running[n].append(at)
            if len(running[n]) == FIRST_TOKENS:
                started(n)
        started(n)  # also if its tokens had less text than that

    def started(n: int) -> None:
        starting.discard(n)
        if not starting:
            ready.set()

    async def about(picture: str, question: str = "What is this?") -> float:
        sent = time.perf_counter()
        content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
        times = [at async for at in token_times(url, content, ANSWER_TOKENS)]
        firsts.append(1e3 * (times[0] - sent))
        lasts.append(times[-1])
        return firsts[-1]

    *pictures, last = [load.picture(1000 * seed + n) for n in range(load.pictures + 1)]
    async with trio.open_nursery() as nursery:
        for n in range(load.streams):
            nursery.start_soon(text, n)
        await ready.wait()
        start = time.perf_counter()
        for picture in pictures:
            nursery.start_soon(about, picture)
            await trio.sleep(load.every_s)
    gaps = [1e3 * (b - a) for times in running for a, b in itertools.pairwise(times) if b >= start]
    figures = Figures(
        wall_s=time.perf_counter() - began,
        gap_p50_ms=percentile(gaps, 50),
        gap_p99_ms=percentile(gaps, 99),
        gap_max_ms=max(gaps, default=None),
        first_ms=statistics.mean(firsts),
        last_ms=1e3 * (max(lasts) - start),
        cpu_s=cpu_s(pid) - used_s,
        alone_ms=0.0,
        again_ms=0.0,
    )
    return attrs.evolve(figures, alone_ms=await about(last), again_ms=await about(last, "Which colours has it?"))


def url_of(rig: Rig) -> str:
    match rig.transport:
        case Gateway(host=host, port=port) | LlamaServer(host=host, port=port):
            return f"http://{host}:{port}"
    raise AssertionError("a server over HTTP")


async def measured(place: Place, contestants: Sequence[Contender], load: Load, repeat: int, file: RunsFile) -> str:
    """Run the load on one server after the other, several times; returns the table."""
    runs: dict[str, list[Figures]] = {}
    for at in range(repeat):
        for contender in contestants:
            async with contender.rig() as rig:
                assert rig.pid is not None, "a server that the bench started"
                with pinned(rig.pid, place.pins):
                    await run(
                        url_of(rig), attrs.evolve(load, pictures=1, tokens=FIRST_TOKENS + 1), 99, rig.pid
                    )  # to warm up
                    figures = await run(url_of(rig), load, at, rig.pid)
            runs.setdefault(str(contender), []).append(figures)
            file.add(at + 1, contender.server, contender.setting, *attrs.astuple(figures))
    by_server = {name: medians(of_server) for name, of_server in runs.items()}
    first = next(iter(by_server.values()))
    lines = [
        [name, *(f"{number(getattr(of_server, n))} ({ratio(getattr(of_server, n), getattr(first, n))})" for n in NAMES)]
        for name, of_server in by_server.items()
    ]
    return table(["server", *NAMES], lines)


@bench()
@click.option("--streams", type=click.IntRange(1), default=8, help="Streams of text.")
@click.option("--tokens", type=click.IntRange(FIRST_TOKENS + 1), default=300, help="Tokens of each stream.")
@click.option("--pictures", type=click.IntRange(1), default=20, help="Requests with a picture each.")
@click.option("--side", type=click.IntRange(8, 8192), default=448, help="Width and height of a picture in pixels.")
@click.option("--every", "every_s", type=click.FloatRange(0), default=0.0, help="Seconds between two pictures.")
@click.option("--shape", type=click.Choice([*SHAPES]), default="tiny", help="Projector, with random weights.")
@places()
@click.option("--ours", multiple=True, default=[""], show_default=False, help="Flags of `uma-trio serve` for one setting; repeatable.")  # fmt: skip
@rival_option()
@click.option("--rival-flags", default="", help="Flags of llama-server.")
@peers_option()
@repeat_option(1)
@csv_option("a row for each run")
def main(streams: int, tokens: int, pictures: int, side: int, every_s: float, shape: str, ours: Sequence[str], rival: bool, rival_flags: str, peers: Path, repeat: int, csv_file: Path | None, **options: Any) -> None:  # fmt: skip
    """Measure gaps of text streams while pictures arrive, the total time, and the first token about a picture.

    A second question about a picture comes at the end. One server runs at a time, and starts again for each run. All pictures differ. A ratio in brackets compares with the
    first row.
    """
    place = Place.of(options)
    load = Load(streams=streams, tokens=tokens, pictures=pictures, side=side, every_s=every_s)
    room = PROMPT_TOKENS + max(tokens, SHAPES[shape].n_patches + ANSWER_TOKENS)
    most = streams + pictures
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=most, ctx=most * (-(-room // 256) * 256)
    )
    place.show()

    async def work() -> str:
        if rival:
            show_rival(peers)
        with tempfile.TemporaryDirectory() as folder:
            projector = Path(folder, "mmproj.gguf")
            make_projector(projector, place.model, SHAPES[shape])
            sees = f"--mmproj {projector} "
            contestants = [
                *(contenders.rivals(peers, serving, [sees + rival_flags]) if rival else []),
                *contenders.ours(serving, [sees + flags for flags in ours], protocol="http"),
            ]
            contestants = [
                attrs.evolve(contender, setting=contender.setting.removeprefix(sees)) for contender in contestants
            ]
            click.echo(f"servers   {serving}, projector {shape}\nload      {load}\n")
            file = RunsFile(csv_file, ["run", "server", "setting", *NAMES])
            return await measured(place, contestants, load, repeat, file)

    click.echo(f"\n{carry_out(work)}")


if __name__ == "__main__":
    main()
