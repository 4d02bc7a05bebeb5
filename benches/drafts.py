"""Measure a draft model: its gain for answers that it knows, and its loss for text that it cannot foresee.

python benches/drafts.py
python benches/drafts.py --draft-model a.gguf --draft-model b.gguf --threads 1 --repeat 5 --csv drafts.csv
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import contenders
from command import Place, bench, carry_out, csv_option, places, repeat_option
from comparison import Contender, RunsFile, interleaved, medians
from measure import WORDS, decode_rate, measure, warm_up
from report import cell, table
from rigs import Rig, ServerSettings

from uma_trio.demo.load import Daemon
from uma_trio.demo.recording import Question, Stream
from uma_trio.models.loaded import EMBEDDED_DRAFT
from uma_trio.training import corpus

OFF = "--no-speculation"
LOOKUP = ""
PARALLEL = 4
MAX_TOKENS = 400
RANDOM_WORDS = 40
RANDOM_TEMPERATURE = 5.0
"""Nobody can foresee what the embedded model says about random words at this temperature."""


@attrs.frozen(kw_only=True)
class Task:
    """What so many clients ask, each its own questions one after another."""

    name: str
    streams: Sequence[Stream]


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of a task in one run, or the medians of several runs."""

    tokens_per_s: float
    """All tokens by the time of the whole task, prefill included."""
    decode_rate: float
    """Tokens a second from the first token of each answer to its last one, for each stream."""
    tokens: float
    drafted: float
    accepted: float
    by_model: float
    """Accepted tokens of the draft model."""
    cpu_ms: float
    """Processor time of the server for each token."""
    others_cpu: float


NAMES = [field.name for field in attrs.fields(Figures)]


def tasks(n: int, seed: int) -> list[Task]:
    """Questions of all skills with one turn, in a random order, and prompts of random words."""
    rng = random.Random(seed)
    asked = [
        Question(text=question.sample.turns[0].question, raw=question.sample.raw, max_tokens=MAX_TOKENS)
        for question in corpus.exam(n, seed=seed)
        if len(question.sample.turns) == 1 and not question.sample.tools and "document" not in question.skill
    ]
    rng.shuffle(asked)
    words = [
        Question(
            text=" ".join(rng.choices(WORDS, k=RANDOM_WORDS)),
            raw=True,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            temperature=RANDOM_TEMPERATURE,
            seed=at,
        )
        for at in range(4 * n)
    ]
    return [
        Task(name=f"{name}, {several} stream{'s' if several > 1 else ''}", streams=_streams(questions, several))
        for name, questions in (("own skills", asked), ("random words", words))
        for several in (1, PARALLEL)
    ]


def _streams(questions: Sequence[Question], n: int) -> list[Stream]:
    return [Stream(name=f"client {at}", questions=tuple(questions[at::n])) for at in range(n)]


async def run(rig: Rig, task: Task, place: Place) -> tuple[Figures, list[list[str]]]:
    """Run a task; return its figures, and the texts of the answers."""
    assert isinstance(rig.transport, Daemon)
    before = await rig.transport.snapshot()
    result = await measure(rig, task.streams, pins=place.pins)
    after = await rig.transport.snapshot()
    counted = {
        name: after[name] - before[name]
        for name in ("draft_tokens_total", "accepted_draft_tokens_total", "accepted_model_draft_tokens_total")
    }
    figures = Figures(
        tokens_per_s=result.tokens_per_s,
        decode_rate=decode_rate([answer for track in result.tracks for answer in track.answers]),
        tokens=result.n_tokens,
        drafted=counted["draft_tokens_total"],
        accepted=counted["accepted_draft_tokens_total"],
        by_model=counted["accepted_model_draft_tokens_total"],
        cpu_ms=1e3 * (result.cpu.server or 0.0) / result.n_tokens,
        others_cpu=result.cpu.others / result.wall_s,
    )
    return figures, [["".join(answer.texts) for answer in track.answers] for track in result.tracks]


def show(figures: dict[Contender, dict[str, Figures]], differ: dict[tuple[Contender, str], int]) -> str:
    """A row for each setting and task, relative to prompt lookup alone and to no speculation at all.

    Args:
        differ: answers that differ from those without speculation.
    """
    header = ("setting", "task", "tok/s", "to lookup", "to none", "decode tok/s", "to lookup", "to none", "CPU ms/token",
              "drafted", "accepted", "by model", "text")  # fmt: skip
    found = {contender.setting: by_task for contender, by_task in figures.items()}
    lines = []
    for contender, by_task in figures.items():
        for task, f in by_task.items():
            lookup, none = found[LOOKUP][task], found[OFF][task]
            text = f"{differ[contender, task]} DIFFER" if differ.get((contender, task)) else "same"
            lines.append([
                Path(contender.setting or "prompt lookup").name, task,
                cell(f.tokens_per_s), cell(f.tokens_per_s / lookup.tokens_per_s, 2), cell(f.tokens_per_s / none.tokens_per_s, 2),
                cell(f.decode_rate), cell(f.decode_rate / lookup.decode_rate, 2), cell(f.decode_rate / none.decode_rate, 2),
                cell(f.cpu_ms, 2), cell(f.drafted, 0), cell(f.accepted, 0), cell(f.by_model, 0), text,
            ])  # fmt: skip
    return table(header, lines)


@bench()
@click.option("--draft-model", "drafts", type=click.Path(exists=True, dir_okay=False), multiple=True, default=[EMBEDDED_DRAFT], show_default=False, help="GGUF of the draft model; repeatable.  [default: that of the embedded model]")  # fmt: skip
@click.option("--questions", type=click.IntRange(1), default=8, help="Questions of each skill.")
@click.option("--seed", type=int, default=2, help="Seed of the questions.")
@places()
@repeat_option(3)
@csv_option("a row for each task of each run")
def main(repeat: int, csv_file: Path | None, **options: Any) -> None:
    """Measure one stream and four, without speculation, with prompt lookup, and with a draft model as well.

    The questions are held out from training, in all skills of the embedded model. At a high temperature after random
    words, no draft is right. The text must be the same in all settings: an answer that differs ends with exit code 1.
    Runs alternate, and each starts its daemon; the table has the medians of --repeat runs.
    """
    place = Place.of(options)
    place.show()

    async def work() -> tuple[str, bool]:
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=PARALLEL, ctx=PARALLEL * 8192)
        asked = tasks(options["questions"], options["seed"])
        click.echo(f"servers   {serving}\nload      {sum(len(s.questions) for s in asked[0].streams)} questions\n")
        ours = contenders.ours(serving, [OFF, LOOKUP, *[f"--draft-model {path}" for path in options["drafts"]]])
        runs: dict[Contender, dict[str, list[Figures]]] = {each: {task.name: [] for task in asked} for each in ours}
        texts: dict[str, list[list[str]]] = {}
        differ: dict[tuple[Contender, str], int] = {}
        file = RunsFile(csv_file, ["run", "setting", "task", *NAMES])
        for contender in interleaved(ours, [], repeat):
            async with contender.rig() as rig:
                await warm_up(rig)
                for task in asked:
                    figures, received = await run(rig, task, place)
                    runs[contender][task.name].append(figures)
                    first = texts.setdefault(task.name, received)
                    n = sum(
                        one != other
                        for one, other in zip(itertools.chain(*received), itertools.chain(*first), strict=True)
                    )
                    differ[contender, task.name] = max(n, differ.get((contender, task.name), 0))
                    at = len(runs[contender][task.name])
                    file.add(at, contender.setting, task.name, *attrs.astuple(figures))
                    click.echo(f"run {at}  {contender!s:<50} {task.name:<24} {figures.tokens_per_s:.0f} tok/s")
        found = {each: {name: medians(figures) for name, figures in by_task.items()} for each, by_task in runs.items()}
        return show(found, differ), any(differ.values())

    shown, differs = carry_out(work)
    click.echo(f"\n{shown}")
    if differs:
        sys.exit(1)


if __name__ == "__main__":
    main()
