"""Measure uma-trio and llama-server over HTTP with aiperf, NVIDIA's public load generator.

python benches/public_load.py --model /tmp/125m.gguf
python benches/public_load.py --model /tmp/125m.gguf --cell chat/200/60/8/turns=4 --rounds 1
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import platformdirs
from command import Place, bench, carry_out, csv_option, places, rival_option, show_rival
from comparison import Contender, RunsFile, interleaved, medians, ratio
from contenders import ours, rivals
from gateway_http import Gateway
from llama_http import LlamaServer
from pinning import pinned
from public_generator import (
    REQUIREMENT,
    SAMPLES,
    Cell,
    Figures,
    Generator,
    arguments,
    given,
    made,
    parse_cell,
    run_cell,
    write_tokenizer,
)
from report import cell as number
from report import table
from rigs import Rig, ServerSettings, peers_option

from uma_trio.tokenizer.tokenizer import open_vocabulary

DEFAULT: Final = "completions/800/60/8"
ALL: Final = (
    DEFAULT,
    "completions/800/60/1",
    "completions/800/60/32",
    "completions/50/60/8",
    "completions/4000/60/8",
    "completions/800/16/8",
    "completions/800/400/8",
    "chat/800/60/8",
    "completions/800/60/8/shared=600",
    "chat/200/60/8/turns=4",
)
"""The default, and one thing changed at a time."""

REQUESTS_PER_CLIENT: Final = 3
MIN_REQUESTS: Final = 8

TEMPLATE: Final = "--chat-template chatml"
"""For a model that has no chat template."""
HOST_CACHE: Final = "--cache-ram 8192"
"""llama-server's default, which the other benches turn off: the prompt cache in host memory, in MiB."""

NAMES: Final = [field.name for field in attrs.fields(Figures)]


@attrs.frozen(kw_only=True)
class Bench:
    """What all cells have in common."""

    place: Place
    peers: Path | None
    """Folder of llama-server; ``None``: without it."""
    generator: Generator
    tokenizer: Path
    template: str
    """Flag of both servers for the chat template, or nothing."""

    def contenders(self, cell: Cell) -> tuple[list[Contender], list[Contender]]:
        """uma-trio, and llama-server if it is wanted."""
        serving = ServerSettings(
            model=self.place.model,
            threads=self.place.threads,
            parallel=cell.concurrency,
            ctx=cell.concurrency * cell.room,
        )
        flags = f"{self.template} {HOST_CACHE if cell.reuses else ''}".strip()
        rival = [] if self.peers is None else rivals(self.peers, serving, [flags])
        return ours(serving, [self.template], protocol="http"), rival

    async def run(self, contender: Contender, cell: Cell, requests: int, seed: int) -> Figures:
        """Start a server, run aiperf once, and stop the server."""
        async with contender.rig() as rig:
            with pinned(rig.pid, self.place.pins), tempfile.TemporaryDirectory(prefix="aiperf-") as out:
                load = arguments(
                    cell,
                    requests,
                    model=self.place.model.stem,
                    url=url(rig),
                    tokenizer=self.tokenizer,
                    out=Path(out),
                    seed=seed,
                )
                return await run_cell(self.generator, load, Path(out))


def url(rig: Rig) -> str:
    """Address of a server's HTTP API."""
    match rig.transport:
        case Gateway(host=host, port=port) | LlamaServer(host=host, port=port):
            return f"http://{host}:{port}"
    raise AssertionError(rig)


def summary(runs: Sequence[Figures]) -> Figures:
    """Medians, and the errors of all runs together."""
    return attrs.evolve(medians(runs), errors=sum(run.errors for run in runs))


def show(measurements: dict[Cell, dict[str, Figures]]) -> str:
    """A row for each cell and server, and one with the ratios of uma-trio to llama-server."""
    header = [
        "", "wall s", "req/s", "TTFT ms", "p99", "ITL ms", "p99", "gap p99", "latency ms", "p99", "in", "out", "cached",
        "errors",
    ]  # fmt: skip
    digits = dict.fromkeys(NAMES, 1) | {"wall_s": 2, "requests_per_s": 3, "errors": 0}
    lines = []
    for cell, servers in measurements.items():
        for server, figures in servers.items():
            values = [number(getattr(figures, name), digits[name]) for name in NAMES]
            lines.append([f"{cell} {server}", *values])
        if len(servers) == 2:
            rival, mine = servers.values()
            ratios = [ratio(getattr(mine, name), getattr(rival, name)) for name in NAMES[:9]]
            lines.append([f"{cell} ratio", *ratios, *[""] * (len(NAMES) - 9)])
    return table(header, lines)


def oddities(cell: Cell, server: str, figures: Figures) -> list[str]:
    """What makes the figures hard to compare."""
    texts = []
    if figures.errors:
        texts.append(f"{figures.errors:.0f} requests failed")
    if figures.answer_tokens not in (None, cell.answer):
        texts.append(f"{figures.answer_tokens:.1f} tokens an answer instead of {cell.answer}")
    if not cell.reuses and figures.cached_tokens is not None and figures.cached_tokens > cell.prompt / 20:
        texts.append(f"{figures.cached_tokens:.0f} tokens of each prompt came from the KV cache")
    return [f"WARNING: {server}, {cell}: {text}" for text in texts]


def chosen(texts: Sequence[str], *, everything: bool) -> list[Cell]:
    """The cells of the command line.

    Raises:
        click.BadParameter: one of them is no cell.
    """
    try:
        return list(dict.fromkeys(parse_cell(text) for text in (*(ALL if everything else ()), *texts) or (DEFAULT,)))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--cell") from None


@bench()
@click.option("--cell", "texts", multiple=True, metavar="CELL", help=f"ENDPOINT/PROMPT/ANSWER/CONCURRENCY[/shared=TOKENS][/turns=N]: completions or chat, tokens of a prompt and of an answer, clients; tokens that all prompts begin with; requests of a conversation.  Repeatable.  [default: {DEFAULT}]")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help=f"Run these, which takes hours on a CPU: {', '.join(ALL)}.")
@click.option("--requests", type=click.IntRange(1, 100_000), help=f"Requests of each run.  [default: {REQUESTS_PER_CLIENT} for each client, at least {MIN_REQUESTS}]")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 100), default=3, help="Runs of each cell and server, alternating.")
@click.option("--aiperf", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help=f"Virtual environment that has {REQUIREMENT}.  [default: one in the user's cache folder, made with pip once]")  # fmt: skip
@places()
@rival_option()
@peers_option()
@csv_option("a row for each run")
def main(texts: Sequence[str], everything: bool, requests: int | None, rounds: int, folder: Path | None, rival: bool, peers: Path, csv_file: Path | None, **options: Any) -> None:  # fmt: skip
    """Measure closed loops of clients over HTTP with aiperf: uma-trio next to llama-server.

    Every run starts its server anew and gives both servers the same prompts, which differ from each other. The table
    has the medians of all rounds. It needs the package aiperf in an environment of its own.
    """
    place = Place.of(options)
    cells = chosen(texts, everything=everything)
    place.show()
    if rival:
        show_rival(peers)

    async def work() -> str:
        generator = given(folder) if folder else await made(
            Path(platformdirs.user_cache_dir("uma-trio"), "bench", REQUIREMENT.replace("==", "-"))
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="tokenizer-") as tokenizer:
            with open_vocabulary(place.model) as vocabulary:
                differ = await write_tokenizer(generator, place.model, vocabulary.tokenizer, Path(tokenizer))
                template = "" if vocabulary.chat_template else TEMPLATE
            click.echo(
                f"load      {REQUIREMENT} in {generator.folder}\n"
                f"tokenizer {differ} of {len(SAMPLES)} samples have other ids in aiperf than in the servers\n"
            )
            common = Bench(
                place=place,
                peers=peers if rival else None,
                generator=generator,
                tokenizer=Path(tokenizer),
                template=template,
            )
            return await measured(
                common, cells, requests, rounds, RunsFile(csv_file, ["run", "cell", "server", *NAMES])
            )

    click.echo(f"\n{carry_out(work)}")


async def measured(common: Bench, cells: Sequence[Cell], requests: int | None, rounds: int, file: RunsFile) -> str:
    """Run all cells, and return the table."""
    measurements: dict[Cell, dict[str, Figures]] = {}
    for cell in cells:
        count = requests or max(MIN_REQUESTS, REQUESTS_PER_CLIENT * cell.concurrency)
        runs: dict[str, list[Figures]] = {}
        for contender in interleaved(*common.contenders(cell), rounds):
            mine = runs.setdefault(contender.server, [])
            figures = await common.run(contender, cell, count, seed=len(mine) + 1)
            mine.append(figures)
            file.add(len(mine), cell, contender.server, *attrs.astuple(figures))
            click.echo(f"{cell} {contender.server} run {len(mine)}: {number(figures.wall_s, 2)} s")
            for line in oddities(cell, contender.server, figures):
                click.echo(line, err=True)
        measurements[cell] = {server: summary(of_server) for server, of_server in runs.items()}
    return show(measurements)


if __name__ == "__main__":
    main()
