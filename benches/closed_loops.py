"""Measure closed loops of clients over HTTP at many sizes: uma-trio next to llama-server.

python benches/closed_loops.py --model /tmp/125m.gguf --threads 1
python benches/closed_loops.py --model 7b.gguf --threads 1 --prompts 50,800 --answers 60 --clients 1,8,32 --rival-flags "-ngl 999"

``public_load.py`` measures the same loops with a public load generator, which takes far longer: this script starts each
server once, and its load generator costs little.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import contenders
import prompts
from command import Place, bench, carry_out, csv_option, numbers, places, repeat_option, rival_option, show_rival
from comparison import Contender, RunsFile, medians, ratio
from measure import Result, measure, warm_up
from report import cell as number
from report import table
from rigs import Rig, ServerSettings, peers_option, without_speculation

from uma_trio.demo.recording import Question, Stream, durations_ms, percentile
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.vocabulary import vocabulary

SPARE_TOKENS: Final = 64
"""Room of a sequence beyond the prompt and the answer."""


@attrs.frozen
class Cell:
    """A closed loop: each client sends its next request when its last one has been answered."""

    clients: int
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer."""

    def __str__(self) -> str:
        return f"{self.clients} x {self.prompt} + {self.answer}"

    def streams(self, tokenizer: Tokenizer, each: int, seed: int) -> list[Stream]:
        """A stream for each client, with ``each`` requests.  All prompts differ."""
        rng = random.Random(f"{self} {seed}")
        return [
            Stream(
                name=f"client {n}",
                questions=tuple(
                    Question(
                        text=prompts.of_tokens(tokenizer, rng, self.prompt),
                        raw=True,
                        max_tokens=self.answer,
                        ignore_eos=True,
                    )
                    for _ in range(each)
                ),
            )
            for n in range(self.clients)
        ]


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several.  TTFT, ITL and latency are means over requests."""

    wall_s: float
    tokens_per_s: float
    """Generated tokens; prefill takes a part of the time."""
    ttft_ms: float
    itl_ms: float
    """From the first token of a request to its last one, divided by the tokens after the first."""
    gap_p99_ms: float | None
    """Over all gaps between two events of a stream."""
    latency_ms: float

    @classmethod
    def of(cls, result: Result) -> Figures:
        answers = [answer for track in result.tracks for answer in track.answers]
        spans = [1e3 * (answer.token_s[-1] - answer.token_s[0]) for answer in answers]
        return cls(
            wall_s=result.wall_s,
            tokens_per_s=result.tokens_per_s,
            ttft_ms=statistics.mean(answer.ttft_ms or 0.0 for answer in answers),
            itl_ms=statistics.mean(
                span / max(answer.completion_tokens - 1, 1) for span, answer in zip(spans, answers, strict=True)
            ),
            gap_p99_ms=percentile(durations_ms(gap for track in result.tracks for gap in track.gaps), 99),
            latency_ms=statistics.mean(1e3 * (answer.token_s[-1] - answer.sent_s) for answer in answers),
        )


NAMES: Final = [field.name for field in attrs.fields(Figures)]


def show(measurements: dict[Cell, dict[str, Figures]]) -> str:
    """A row for each cell: ours / theirs, and the ratios."""
    header = ["clients x prompt + answer", "wall s", "ratio", "TTFT ms", "ratio", "ITL ms", "ratio", "gap p99 ms", "ratio", "latency ms", "ratio"]  # fmt: skip
    shown = {"wall_s": 2, "ttft_ms": 0, "itl_ms": 1, "gap_p99_ms": 0, "latency_ms": 0}
    lines = []
    for cell, servers in measurements.items():
        rival, *mine = servers.values()
        line = [str(cell)]
        for name, digits in shown.items():
            theirs, *ours = (getattr(figures, name) for figures in (rival, *mine))
            line += [
                " / ".join(number(value, digits) for value in (theirs, *ours)),
                *(ratio(value, theirs) for value in ours[:1] or [theirs]),
            ]
        lines.append(line)
    return table(header, lines)


async def run(rig: Rig, cell: Cell, streams: Sequence[Stream], place: Place) -> Figures:
    """Run a cell once, and say on standard error which answers are incomplete."""
    result = await measure(rig, streams, pins=place.pins)
    for line in result.unfinished():
        click.echo(f"WARNING: {cell}: {line}", err=True)
    return Figures.of(result)


async def measured(
    place: Place, contestants: Sequence[Contender], cells: Sequence[Cell], each: int, repeat: int, file: RunsFile
) -> str:
    """Start all servers, run all cells on each of them in turns, and return the table."""
    measurements: dict[Cell, dict[str, Figures]] = {}
    with vocabulary(place.model) as tokenizer:
        async with contextlib.AsyncExitStack() as stack:
            rigs = {one: without_speculation(await stack.enter_async_context(one.rig())) for one in contestants}
            for rig in rigs.values():
                await warm_up(rig)
            for cell in cells:
                runs: dict[str, list[Figures]] = {}
                for at in range(repeat):
                    streams = cell.streams(tokenizer, each, at)
                    for contender, rig in rigs.items():
                        figures = await run(rig, cell, streams, place)
                        runs.setdefault(str(contender), []).append(figures)
                        file.add(at + 1, cell, contender.server, contender.setting, *attrs.astuple(figures))
                measurements[cell] = {name: medians(mine) for name, mine in runs.items()}
                click.echo(show({cell: measurements[cell]}).splitlines()[-1])
    return show(measurements)


@bench()
@click.option("--clients", default="1,8,32", help="Clients at the same time; numbers, separated by commas.")
@click.option("--prompts", default="50,800,4000", help="Tokens of a prompt.")
@click.option("--answers", default="16,60,400", help="Tokens of an answer.")
@click.option("--each", type=click.IntRange(1), default=2, help="Requests of each client.")
@places()
@click.option("--ours", multiple=True, default=[""], show_default=False, help="Flags of `uma-trio serve` for one setting; repeatable.")  # fmt: skip
@rival_option()
@click.option("--rival-flags", default="", help="Flags of llama-server.")
@peers_option()
@repeat_option(1)
@csv_option("a row for each run")
def main(clients: str, prompts: str, answers: str, each: int, ours: Sequence[str], rival: bool, rival_flags: str, peers: Path, repeat: int, csv_file: Path | None, **options: Any) -> None:  # fmt: skip
    """Measure closed loops over HTTP: every combination of clients, prompts and answers.

    Each server starts once, with room for the largest combination, and idles while the other one is measured. All
    prompts differ, answers are greedy and have their full length, and there are no draft tokens. A row has llama-server
    / uma-trio, and the ratio of the first setting of uma-trio to llama-server.
    """
    place = Place.of(options)
    cells = [
        Cell(*sizes)
        for sizes in itertools.product(
            numbers(clients, "--clients"), numbers(prompts, "--prompts"), numbers(answers, "--answers")
        )
    ]
    most = max(cell.clients for cell in cells)
    room = max(cell.prompt + cell.answer for cell in cells) + SPARE_TOKENS
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=most, ctx=most * (-(-room // 256) * 256)
    )
    place.show()
    contestants = [
        *(contenders.rivals(peers, serving, [rival_flags]) if rival else []),
        *contenders.ours(serving, ours, protocol="http"),
    ]

    async def work() -> str:
        if rival:
            show_rival(peers)
        click.echo(f"servers   {serving}\n")
        file = RunsFile(csv_file, ["run", "cell", "server", "setting", *NAMES])
        return await measured(place, contestants, cells, each, repeat, file)

    click.echo(f"\n{carry_out(work)}")


if __name__ == "__main__":
    main()
