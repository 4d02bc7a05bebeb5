"""Measure speculation with prompt lookup: its gain for answers that copy the prompt, and its loss for others.

python benches/lookup.py
python benches/lookup.py --model /tmp/125m.gguf --threads 1 --repeat 5 --csv lookup.csv
python benches/lookup.py --rival-flags "" --rival-flags "--spec-type ngram-simple"
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import contenders
from command import Place, bench, carry_out, csv_option, places, repeat_option, show_rival
from comparison import Contender, RunsFile, interleaved, medians
from measure import WORDS, Result, decode_rate, measure, warm_up
from report import cell, table
from rigs import Rig, ServerSettings, peers_option, uma_trio_flags, uma_trio_rig

from uma_trio.demo.load import Daemon
from uma_trio.demo.recording import Question, Stream
from uma_trio.models.packaged import EMBEDDED
from uma_trio.training.skills import records, stories

OFF, ON = "--no-speculation", "--speculation"

MIN_CHARS = 600
"""Characters of a text that is copied.  A shorter copy ends before drafts pay."""
MAX_PROMPTS = 32
"""Prompts that are tried with a random model until enough answers repeat themselves."""
PARALLEL_PROMPTS = 8
WORD_REPETITIONS = 1400
LONGEST_LOOP = 200
"""Characters of the repeated part, at most."""


@attrs.frozen(kw_only=True)
class Task:
    """Questions of one kind, which are sent one after another."""

    name: str
    questions: Sequence[Question]


Texts = list[list[str]]
"""For each answer, the text of each token event."""


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of a task in one run, or the medians of several runs."""

    tokens_per_s: float
    """From the first token of each answer to its last one."""
    tokens: float
    drafted: float | None
    """Draft tokens; ``None`` if the server does not report them."""
    accepted: float | None
    others_cpu: float


NAMES = [field.name for field in attrs.fields(Figures)]


# -- the tasks ------------------------------------------------------------------------------------


def known_tasks(n: int, tokens: int, seed: int) -> list[Task]:
    """Tasks for the embedded model: JSON lists to repeat with one field changed, and stories."""
    return [
        Task(
            name="copying (JSON)",
            questions=[_asked(text, tokens) for _, text in zip(range(n), _lists(seed), strict=False)],
        ),
        Task(
            name="ordinary (stories)",
            questions=[_asked(text, tokens) for _, text in zip(range(n), _stories(seed), strict=False)],
        ),
    ]


def _asked(text: str, tokens: int) -> Question:
    return Question(text=f"{text}\n", raw=True, max_tokens=tokens)


def _lists(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        turn = records.change_in_list(rng, 30)
        if len(turn.question) >= MIN_CHARS:
            yield turn.question


def _stories(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        turn = stories.tell(rng, 40)
        if len(turn.answer) >= MIN_CHARS:
            yield turn.question


async def random_tasks(rig: Rig, n: int, tokens: int, seed: int) -> list[Task]:
    """Tasks for a model with random weights: at most ``n`` greedy answers that repeat themselves, and ``n`` others.

    After a word that is repeated a thousand times, attention hardly changes from token to token.  The next token then
    depends on the last one only, and some answers become loops.

    Raises:
        click.ClickException: no answer is a loop.
    """
    rng = random.Random(seed)
    words = rng.sample(WORDS, k=MAX_PROMPTS)
    ordinary = [_exactly(" ".join(rng.choices(WORDS, k=WORD_REPETITIONS)), tokens) for _ in range(n)]
    loops: list[Question] = []
    for at in range(0, MAX_PROMPTS, PARALLEL_PROMPTS):
        some = [_exactly(" ".join([word] * WORD_REPETITIONS), tokens) for word in words[at : at + PARALLEL_PROMPTS]]
        result = await measure(rig, [Stream(name="try", questions=(question,)) for question in some])
        answers = [answer for track in result.tracks for answer in track.answers]
        loops += [answer.question for answer in answers if is_loop(answer.text)]
        click.echo(f"{len(loops)} of {at + len(some)} answers are loops")
        if len(loops) >= n:
            break
    if not loops:
        raise click.ClickException("no greedy answer is a loop; try another --seed, or more --tokens")
    return [Task(name="copying (loops)", questions=loops[:n]), Task(name="ordinary", questions=ordinary)]


def _exactly(text: str, tokens: int) -> Question:
    return Question(text=text, raw=True, max_tokens=tokens, ignore_eos=True)


def is_loop(text: str) -> bool:
    """Whether the second half of ``text`` is a repetition of one part."""
    tail = text[len(text) // 2 :]
    return any(tail[period:] == tail[:-period] for period in range(1, min(LONGEST_LOOP, len(tail) // 3) + 1))


# -- the figures -----------------------------------------------------------------------------------


async def run(rig: Rig, task: Task, place: Place) -> tuple[Figures, Texts]:
    """Run a task; return its figures, and the texts of its token events."""
    before = await _draft_counts(rig)
    result: Result = await measure(rig, [Stream(name=task.name, questions=tuple(task.questions))], pins=place.pins)
    after = await _draft_counts(rig)
    answers = result.tracks[0].answers
    figures = Figures(
        tokens_per_s=decode_rate(answers),
        tokens=sum(answer.completion_tokens for answer in answers),
        drafted=None if after is None or before is None else after[0] - before[0],
        accepted=None if after is None or before is None else after[1] - before[1],
        others_cpu=result.cpu.others / result.wall_s,
    )
    return figures, [answer.texts for answer in answers]


def first_difference(texts: Texts, others: Texts) -> int | None:
    """Number of the first event, counted from 1, whose text differs from that in ``others``; the lowest of all answers."""
    differences = [
        at
        for text, other in zip(texts, others, strict=True)
        for at, (one, another) in enumerate(itertools.zip_longest(text, other), 1)
        if one != another
    ]
    return min(differences, default=None)


async def _draft_counts(rig: Rig) -> tuple[int, int] | None:
    """Draft tokens and accepted ones so far; ``None`` if the server does not report them."""
    if not isinstance(rig.transport, Daemon):
        return None
    snapshot = await rig.transport.snapshot()
    return snapshot["draft_tokens_total"], snapshot["accepted_draft_tokens_total"]


def show(figures: dict[Contender, dict[str, Figures]], differ: dict[tuple[Contender, str], int]) -> str:
    """A row for each contender and task, relative to the first setting of its server, which has no speculation.

    Args:
        differ: number of the first event that differs from the first setting.
    """
    header = ("", "task", "tok/s", "ratio", "tokens", "drafted", "accepted", "text")
    base = {contender.server: by_task for contender, by_task in reversed(figures.items())}
    lines = [
        [
            str(contender), task, cell(f.tokens_per_s), cell(f.tokens_per_s / base[contender.server][task].tokens_per_s, 2),
            cell(f.tokens, 0), cell(f.drafted, 0), cell(f.accepted, 0), f"DIFFERS from token {differ[contender, task]}" if (contender, task) in differ else "same",
        ]
        for contender, by_task in figures.items()
        for task, f in by_task.items()
    ]  # fmt: skip
    return table(header, lines)


@bench()
@click.option("--questions", type=click.IntRange(1), default=3, help="Questions of each kind.")
@click.option(
    "--tokens",
    type=click.IntRange(16),
    default=1000,
    help="Most tokens of an answer; exactly as many with a random model.",
)
@click.option("--seed", type=int, default=0, help="Seed of the questions.")
@places()
@click.option("--rival-flags", multiple=True, default=[], help="Flags of llama-server, which has speculation too; repeatable.  Ratios are relative to the first.  [default: no rival]", show_default=False)  # fmt: skip
@peers_option()
@repeat_option(3)
@csv_option("a row for each task of each run")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(repeat: int, csv_file: Path | None, **options: Any) -> None:
    """Measure one stream with --no-speculation and with --speculation.

    The embedded model repeats JSON lists with one field changed, and tells stories. Any other model is assumed to have
    random weights: prompts are tried until enough greedy answers are loops, which stand for copying. SERVE_FLAGS
    after -- go to `uma-trio serve`.

    Rejected draft tokens are dropped, so the text must be the same with speculation. If a text of the embedded model
    differs, the exit code is 1. Texts of a random model can differ, since its best tokens are almost equally likely,
    and some kernels round differently for wider batches. Runs alternate, and each starts its server; the table has the
    medians of --repeat runs.
    """
    place = Place.of(options)
    n, tokens, seed = options["questions"], options["tokens"], options["seed"]
    place.show()

    async def tasks(serving: ServerSettings) -> list[Task]:
        if place.model == EMBEDDED:
            return known_tasks(n, tokens, seed)
        several = attrs.evolve(serving, parallel=PARALLEL_PROMPTS, ctx=PARALLEL_PROMPTS * serving.ctx)
        async with uma_trio_rig([*uma_trio_flags(several), OFF]) as rig:
            return await random_tasks(rig, n, tokens, seed)

    async def work() -> tuple[str, bool]:
        """Return the table, and whether a text of uma-trio differs."""
        ctx = 8192 if place.model == EMBEDDED else -(-(2 * WORD_REPETITIONS + tokens) // 256) * 256
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=1, ctx=ctx)
        if options["rival_flags"]:
            show_rival(options["peers"])
        click.echo(f"servers   {serving}\nload      {n} questions of each kind, at most {tokens} tokens, seed {seed}\n")
        asked = await tasks(serving)
        ours = contenders.ours(serving, [" ".join([setting, *options["serve_flags"]]) for setting in (OFF, ON)])
        rivals = contenders.rivals(options["peers"], serving, options["rival_flags"])
        runs: dict[Contender, dict[str, list[Figures]]] = {
            contender: {task.name: [] for task in asked} for contender in [*ours, *rivals]
        }
        texts: dict[tuple[str, str], Texts] = {}
        differ: dict[tuple[Contender, str], int] = {}
        file = RunsFile(csv_file, ["run", "server", "setting", "task", *NAMES])
        for contender in interleaved(ours, rivals, repeat):
            async with contender.rig() as rig:
                await warm_up(rig)
                for task in asked:
                    figures, received = await run(rig, task, place)
                    runs[contender][task.name].append(figures)
                    at = first_difference(received, texts.setdefault((contender.server, task.name), received))
                    if at is not None:
                        differ[contender, task.name] = min(at, differ.get((contender, task.name), at))
                    file.add(
                        len(runs[contender][task.name]),
                        contender.server,
                        contender.setting,
                        task.name,
                        *attrs.astuple(figures),
                    )
                    click.echo(
                        f"run {len(runs[contender][task.name])}  {contender!s:<36} {task.name:<20} {figures.tokens_per_s:.1f} tok/s"
                    )
        by_contender = {
            contender: {name: medians(runs_of_task) for name, runs_of_task in by_task.items()}
            for contender, by_task in runs.items()
        }
        return show(by_contender, differ), any(contender.ours for contender, _ in differ)

    shown, differs = carry_out(work)
    click.echo(f"\n{shown}")
    if differs and place.model == EMBEDDED:
        sys.exit(1)


if __name__ == "__main__":
    main()
