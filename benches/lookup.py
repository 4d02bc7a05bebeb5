"""Guessing from what was said before: what does prompt lookup gain where answers copy, and lose where they do not?

    python benches/lookup.py
    python benches/lookup.py --model /tmp/125m.gguf --threads 1 --repeat 5 --csv lookup.csv
    python benches/lookup.py --rival-flags "" --rival-flags "--spec-type ngram-simple"
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import contenders
from command import Place, bench, carry_out, csv_option, places, repeat_option, tell_rival
from comparison import Contender, RunsFile, interleaved, medians
from measure import WORDS, Result, decode_rate, measure, warm_up
from report import cell, table
from rigs import Rig, Serving, peers_option, uma_trio_flags, uma_trio_rig

from uma_trio.demo.load import Daemon
from uma_trio.demo.recording import Question, Stream
from uma_trio.models.loaded import EMBEDDED
from uma_trio.models.training.skills import records, stories

OFF, ON = "--no-speculation", "--speculation"

LEAST_CHARS = 600
"""Of a question to copy from: a short one is over before a guess is worth looking for."""
MOST_TRIES = 60
"""Prompts of a random model of which one is tried after the other for answers that repeat themselves."""
LONGEST_LOOP = 24
"""Characters."""


@attrs.frozen(kw_only=True)
class Task:
    """Questions of one kind, one after another."""

    name: str
    questions: Sequence[Question]


@attrs.frozen(kw_only=True)
class Figures:
    """Of one task in one run, or the medians of several."""

    tokens_per_s: float
    """From each answer's first token to its last."""
    tokens: float
    drafted: float | None
    """Tokens that were guessed; ``None`` where the server does not tell."""
    accepted: float | None
    others_cpu: float


NAMES = [field.name for field in attrs.fields(Figures)]


# -- what is asked ---------------------------------------------------------------------------------


def known_tasks(n: int, tokens: int, seed: int) -> list[Task]:
    """Of the embedded model: lists to be written again with one field changed, and stories."""
    return [
        Task(name="copying (JSON)", questions=[_asked(text, tokens) for _, text in zip(range(n), _lists(seed), strict=False)]),
        Task(name="ordinary (stories)", questions=[_asked(text, tokens) for _, text in zip(range(n), _stories(seed), strict=False)]),
    ]


def _asked(text: str, tokens: int) -> Question:
    return Question(text=f"{text}\n", raw=True, max_tokens=tokens)


def _lists(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        turn = records.change_in_list(rng, 30)
        if len(turn.question) >= LEAST_CHARS:
            yield turn.question


def _stories(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        turn = stories.tell(rng, 40)
        if len(turn.answer) >= LEAST_CHARS:
            yield turn.question


async def random_tasks(rig: Rig, n: int, tokens: int, seed: int) -> list[Task]:
    """Of a model with random weights: greedy answers that go round in circles, which is copying, and others.

    Few do: prompts of two words again and again are tried until ``n`` of each kind are found.

    Raises:
        click.ClickException: there are too few.
    """
    rng = random.Random(seed)
    loops: list[Question] = []
    others: list[Question] = []
    for _ in range(MOST_TRIES):
        question = Question(text=" ".join(rng.choices(WORDS, k=2) * 40), raw=True, max_tokens=tokens, ignore_eos=True)
        result = await measure(rig, [Stream(name="try", questions=(question,))])
        (loops if is_loop(result.tracks[0].answers[0].text) else others).append(question)
        if min(len(loops), len(others)) >= n:
            return [Task(name="copying (loops)", questions=loops[:n]), Task(name="ordinary", questions=others[:n])]
    raise click.ClickException(
        f"of {MOST_TRIES} greedy answers {len(loops)} go round in circles and {len(others)} do not; ask for fewer with --questions"
    )


def is_loop(text: str) -> bool:
    """Whether the second half of ``text`` is one short piece, again and again."""
    tail = text[len(text) // 2 :]
    return any(tail[period:] == tail[:-period] for period in range(1, LONGEST_LOOP + 1)) if len(tail) > 2 * LONGEST_LOOP else False


# -- what came of it -------------------------------------------------------------------------------


async def run(rig: Rig, task: Task, place: Place) -> tuple[Figures, list[str]]:
    """The figures, and the texts."""
    before = await _guesses(rig)
    result: Result = await measure(rig, [Stream(name=task.name, questions=tuple(task.questions))], pins=place.pins)
    after = await _guesses(rig)
    answers = result.tracks[0].answers
    figures = Figures(
        tokens_per_s=decode_rate(answers),
        tokens=sum(answer.completion_tokens for answer in answers),
        drafted=None if after is None or before is None else after[0] - before[0],
        accepted=None if after is None or before is None else after[1] - before[1],
        others_cpu=result.cpu.others / result.wall_s,
    )
    return figures, [answer.text for answer in answers]


async def _guesses(rig: Rig) -> tuple[int, int] | None:
    """Tokens drafted and accepted so far, where the server tells."""
    if not isinstance(rig.transport, Daemon):
        return None
    snapshot = await rig.transport.snapshot()
    return snapshot["drafted_total"], snapshot["accepted_total"]


def show(figures: dict[Contender, dict[str, Figures]], same: dict[tuple[Contender, str], bool]) -> str:
    """Each beside its server's first setting, which guesses nothing."""
    header = ("", "task", "tok/s", "times without", "tokens", "drafted", "accepted", "text")
    base = {contender.server: found for contender, found in reversed(figures.items())}
    lines = [
        [
            str(contender), task, cell(f.tokens_per_s), cell(f.tokens_per_s / base[contender.server][task].tokens_per_s, 2),
            cell(f.tokens, 0), cell(f.drafted, 0), cell(f.accepted, 0), "same" if same[contender, task] else "DIFFERS",
        ]
        for contender, found in figures.items()
        for task, f in found.items()
    ]  # fmt: skip
    return table(header, lines)


@bench()
@click.option("--questions", type=click.IntRange(1), default=3, help="Of each kind.")
@click.option("--tokens", type=click.IntRange(16), default=1000, help="Most that an answer has; a random model's has as many.")
@click.option("--seed", type=int, default=0, help="Of the questions.")
@places()
@click.option("--rival-flags", multiple=True, default=[], help="Flags of llama-server, which has such guesses too; given twice, the first is what the second is held against, as in the example.  [default: no rival]", show_default=False)  # fmt: skip
@peers_option()
@repeat_option(3)
@csv_option("a row for each task of each run")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(repeat: int, csv_file: Path | None, **options: Any) -> None:
    """One stream with --no-speculation and with --speculation: tokens a second, guesses, and whether the texts are the same.

    The embedded model writes JSON lists again with one field changed, and tells stories. Any other model
    is taken for one with random weights: prompts are tried until enough greedy answers are found that go round in
    circles, which is what copying is to such a model. SERVE_FLAGS after -- go to `uma-trio serve`.

    Guesses are right or dropped, so every text must be the same as without them; if one differs, this says so
    and exits with 1. Interleaved runs, each starting its server anew; medians of --repeat.
    """
    place = Place.of(options)
    n, tokens, seed = options["questions"], options["tokens"], options["seed"]
    place.tell()

    async def tasks(serving: Serving) -> list[Task]:
        if place.model == EMBEDDED:
            return known_tasks(n, tokens, seed)
        async with uma_trio_rig([*uma_trio_flags(serving), OFF]) as rig:
            return await random_tasks(rig, n, tokens, seed)

    async def work() -> tuple[str, bool]:
        serving = Serving(model=place.model, threads=place.threads, parallel=1, ctx=8192 if place.model == EMBEDDED else 512 + tokens)
        if options["rival_flags"]:
            tell_rival(options["peers"])
        click.echo(f"servers   {serving}\nload      {n} questions of each kind, at most {tokens} tokens, seed {seed}\n")
        asked = await tasks(serving)
        ours = contenders.ours(serving, [" ".join([setting, *options["serve_flags"]]) for setting in (OFF, ON)])
        rivals = contenders.rivals(options["peers"], serving, options["rival_flags"])
        runs: dict[Contender, dict[str, list[Figures]]] = {each: {task.name: [] for task in asked} for each in [*ours, *rivals]}
        texts: dict[tuple[str, str], list[str]] = {}
        same = {(contender, task.name): True for contender in runs for task in asked}
        file = RunsFile(csv_file, ["run", "server", "setting", "task", *NAMES])
        for contender in interleaved(ours, rivals, repeat):
            async with contender.rig() as rig:
                await warm_up(rig)
                for task in asked:
                    figures, said = await run(rig, task, place)
                    runs[contender][task.name].append(figures)
                    same[contender, task.name] &= said == texts.setdefault((contender.server, task.name), said)
                    file.add(len(runs[contender][task.name]), contender.server, contender.setting, task.name, *attrs.astuple(figures))
                    click.echo(f"run {len(runs[contender][task.name])}  {contender!s:<36} {task.name:<20} {figures.tokens_per_s:.1f} tok/s")
        found = {contender: {name: medians(each) for name, each in by_task.items()} for contender, by_task in runs.items()}
        return show(found, same), all(same[contender, task.name] for contender in ours for task in asked)

    shown, all_same = carry_out(work)
    click.echo(f"\n{shown}")
    if not all_same:
        sys.exit(1)


if __name__ == "__main__":
    main()
