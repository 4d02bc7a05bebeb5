"""Measure a draft model: its gain for answers that it knows, and its loss for text that it cannot foresee.

python benches/drafts.py
python benches/drafts.py --draft-model a.gguf --draft-model b.gguf --threads 1 --rounds 5 --csv drafts.csv
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import contenders
from command import Place, bench, carry_out, csv_option, places
from comparison import Contender, RunsFile
from measure import WORDS, measure, warm_up
from report import cell, table
from rigs import Rig, ServerSettings

from uma_trio.demo.load import Daemon
from uma_trio.demo.recording import Question, Stream
from uma_trio.models.packaged import EMBEDDED_DRAFT
from uma_trio.training import corpus

OFF = "--no-speculation"
LOOKUP = ""
PARALLEL = 4
MAX_TOKENS = 400
RANDOM_WORDS = 40
RANDOM_TOKENS = 100
RANDOM_TEMPERATURE = 5.0
"""Nobody can foresee what the embedded model says about random words at this temperature."""


@attrs.frozen(kw_only=True)
class Task:
    """What so many clients ask, each its own questions one after another."""

    name: str
    streams: Sequence[Stream]


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of a task, or of a part of it."""

    wall_s: float
    """Time of the whole task, prefill included."""
    decode_s: float
    """Time from the first token of each answer to its last one, added up."""
    decoded: float
    """Tokens in that time."""
    tokens: float
    drafted: float
    accepted: float
    by_model: float
    """Accepted tokens of the draft model."""
    cpu_s: float
    """Processor time of the server."""
    others_s: float
    """Processor time of other programs."""

    def __add__(self, other: Figures) -> Figures:
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in NAMES})

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def decode_rate(self) -> float:
        """Tokens a second of one stream."""
        return self.decoded / self.decode_s


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
            max_tokens=RANDOM_TOKENS,
            ignore_eos=True,
            temperature=RANDOM_TEMPERATURE,
            seed=at,
        )
        for at in range(16 * n)
    ]
    return [
        Task(name=f"{name}, {several} stream{'s' if several > 1 else ''}", streams=_streams(questions, several))
        for name, questions in (("own skills", asked), ("random words", words))
        for several in (1, PARALLEL)
    ]


def slices(task: Task, questions: int = 1) -> list[Task]:
    """The task in parts of so many questions for each client."""
    most = max(len(stream.questions) for stream in task.streams)
    return [
        attrs.evolve(
            task,
            streams=[attrs.evolve(stream, questions=stream.questions[at : at + questions]) for stream in task.streams],
        )
        for at in range(0, most, questions)
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
    answers = [answer for track in result.tracks for answer in track.answers]
    figures = Figures(
        wall_s=result.wall_s,
        decode_s=sum(answer.token_s[-1] - answer.token_s[0] for answer in answers),
        # several tokens may arrive in one event; they count at its time
        decoded=sum((len(answer.token_s) - 1) * answer.completion_tokens / len(answer.token_s) for answer in answers),
        tokens=result.n_tokens,
        drafted=counted["draft_tokens_total"],
        accepted=counted["accepted_draft_tokens_total"],
        by_model=counted["accepted_model_draft_tokens_total"],
        cpu_s=result.cpu.server or 0.0,
        others_s=result.cpu.others,
    )
    return figures, [["".join(answer.texts) for answer in track.answers] for track in result.tracks]


def show(measured: dict[Contender, dict[str, list[list[Figures]]]], differ: dict[tuple[Contender, str], int]) -> str:
    """A row for each setting and task, relative to prompt lookup alone and to no speculation at all.

    Args:
        measured: figures of each part of a task, in each round.
        differ: answers that differ from those without speculation.
    """
    header = ("setting", "task", "tok/s", "to lookup", "to none", "decode tok/s", "to lookup", "to none", "CPU ms/token",
              "drafted", "accepted", "by model", "text")  # fmt: skip
    fastest = {
        contender.setting: {
            task: _sum([min(rounds, key=lambda round_figures: round_figures.wall_s) for rounds in parts])
            for task, parts in by_task.items()
        }
        for contender, by_task in measured.items()
    }
    lines = []
    for contender in measured:
        for task, f in fastest[contender.setting].items():
            lookup, none = fastest[LOOKUP][task], fastest[OFF][task]
            text = f"{differ[contender, task]} DIFFER" if differ.get((contender, task)) else "same"
            lines.append([
                Path(contender.setting or "prompt lookup").name, task,
                cell(f.tokens_per_s), cell(f.tokens_per_s / lookup.tokens_per_s, 2), cell(f.tokens_per_s / none.tokens_per_s, 2),
                cell(f.decode_rate), cell(f.decode_rate / lookup.decode_rate, 2), cell(f.decode_rate / none.decode_rate, 2),
                cell(1e3 * f.cpu_s / f.tokens, 2), cell(f.drafted, 0), cell(f.accepted, 0), cell(f.by_model, 0), text,
            ])  # fmt: skip
    return table(header, lines)


def _sum(figures: Sequence[Figures]) -> Figures:
    return functools.reduce(operator.add, figures)


@bench()
@click.option("--draft-model", "drafts", type=click.Path(exists=True, dir_okay=False), multiple=True, default=[EMBEDDED_DRAFT], show_default=False, help="GGUF of the draft model; repeatable.  [default: that of the embedded model]")  # fmt: skip
@click.option("--questions", type=click.IntRange(1), default=8, help="Questions of each skill.")
@click.option("--seed", type=int, default=2, help="Seed of the questions.")
@places()
@click.option("--rounds", type=click.IntRange(1), default=5, help="How often all of it is measured.")
@csv_option("a row for each part of each task and round")
def main(rounds: int, csv_file: Path | None, **options: Any) -> None:
    """Measure one stream and four, without speculation, with prompt lookup, and with a draft model as well.

    The questions are held out from training, in all skills of the embedded model. At a high temperature after random
    words, no draft is right. The text must be the same in all settings: an answer that differs ends with exit code 1.
    All daemons run, and they get the questions in turns, one for each client at a time, so that other programs disturb
    all alike. The table has the fastest of all rounds of each such turn, added up.
    """
    place = Place.of(options)
    place.show()

    async def work() -> tuple[str, bool]:
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=PARALLEL, ctx=PARALLEL * 8192)
        asked = tasks(options["questions"], options["seed"])
        click.echo(f"servers   {serving}\nload      {sum(len(s.questions) for s in asked[0].streams)} questions\n")
        ours = contenders.ours(serving, [OFF, LOOKUP, *[f"--draft-model {path}" for path in options["drafts"]]])
        measured: dict[Contender, dict[str, list[list[Figures]]]] = {
            contender: {task.name: [[] for _ in slices(task)] for task in asked} for contender in ours
        }
        texts: dict[tuple[str, int], list[list[str]]] = {}
        differ: dict[tuple[Contender, str], int] = {}
        file = RunsFile(csv_file, ["round", "setting", "task", "part", *NAMES])
        async with contextlib.AsyncExitStack() as stack:
            rigs = {contender: await stack.enter_async_context(contender.rig()) for contender in ours}
            for rig in rigs.values():
                await warm_up(rig)
            for number, task in itertools.product(range(1, rounds + 1), asked):
                for at, part in enumerate(slices(task)):
                    first = (at + number) % len(ours)
                    for contender in [*ours[first:], *ours[:first]]:
                        figures, received = await run(rigs[contender], part, place)
                        measured[contender][task.name][at].append(figures)
                        file.add(number, contender.setting, task.name, at, *attrs.astuple(figures))
                        expected = itertools.chain(*texts.setdefault((task.name, at), received))
                        n = sum(one != other for one, other in zip(itertools.chain(*received), expected, strict=True))
                        differ[contender, task.name] = differ.get((contender, task.name), 0) + n
                for contender in ours:
                    figures = _sum([rounds[-1] for rounds in measured[contender][task.name]])
                    click.echo(f"round {number}  {contender!s:<50} {task.name:<24} {figures.tokens_per_s:.0f} tok/s")
        return show(measured, differ), any(differ.values())

    shown, differs = carry_out(work)
    click.echo(f"\n{shown}")
    if differs:
        sys.exit(1)


if __name__ == "__main__":
    main()
