"""Guessing from what was said before: what does prompt lookup gain where answers copy, and lose where they do not?

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
from uma_trio.models.loaded import EMBEDDED
from uma_trio.training.skills import records, stories

OFF, ON = "--no-speculation", "--speculation"

LEAST_CHARS = 600
"""Of a question to copy from: a short one is over before a guess is worth looking for."""
MOST_TRIES = 32
"""Prompts of a random model that are tried for answers that go round in circles."""
TRIED_AT_ONCE = 8
WORD_TIMES = 1400
LONGEST_LOOP = 200
"""Characters."""


@attrs.frozen(kw_only=True)
class Task:
    """Questions of one kind, one after another."""

    name: str
    questions: Sequence[Question]


Texts = list[list[str]]


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
        if len(turn.question) >= LEAST_CHARS:
            yield turn.question


def _stories(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        turn = stories.tell(rng, 40)
        if len(turn.answer) >= LEAST_CHARS:
            yield turn.question


async def random_tasks(rig: Rig, n: int, tokens: int, seed: int) -> list[Task]:
    """Of a model with random weights: greedy answers that go round in circles, which is copying, at most ``n``; and any.

    After one word a thousand times what is attended to hardly changes, the next token follows from the last
    one, and some answers find a circle.

    Raises:
        click.ClickException: none does.
    """
    rng = random.Random(seed)
    words = rng.sample(WORDS, k=MOST_TRIES)
    ordinary = [_exactly(" ".join(rng.choices(WORDS, k=WORD_TIMES)), tokens) for _ in range(n)]
    loops: list[Question] = []
    for at in range(0, MOST_TRIES, TRIED_AT_ONCE):
        some = [_exactly(" ".join([word] * WORD_TIMES), tokens) for word in words[at : at + TRIED_AT_ONCE]]
        result = await measure(rig, [Stream(name="try", questions=(question,)) for question in some])
        answers = [answer for track in result.tracks for answer in track.answers]
        loops += [answer.question for answer in answers if is_loop(answer.text)]
        click.echo(f"{len(loops)} of {at + len(some)} answers go round in circles")
        if len(loops) >= n:
            break
    if not loops:
        raise click.ClickException("no greedy answer goes round in circles; try another --seed, or more --tokens")
    return [Task(name="copying (loops)", questions=loops[:n]), Task(name="ordinary", questions=ordinary)]


def _exactly(text: str, tokens: int) -> Question:
    return Question(text=text, raw=True, max_tokens=tokens, ignore_eos=True)


def is_loop(text: str) -> bool:
    """Whether the second half of ``text`` is one piece, again and again."""
    tail = text[len(text) // 2 :]
    return any(tail[period:] == tail[:-period] for period in range(1, min(LONGEST_LOOP, len(tail) // 3) + 1))


# -- what came of it -------------------------------------------------------------------------------


async def run(rig: Rig, task: Task, place: Place) -> tuple[Figures, Texts]:
    """The figures, and the texts as they came, piece by piece."""
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
    return figures, [answer.texts for answer in answers]


def first_difference(texts: Texts, others: Texts) -> int | None:
    """The piece of an answer that is another one in ``others``, counted from 1; the earliest of all answers'."""
    found = [
        at
        for text, other in zip(texts, others, strict=True)
        for at, (piece, another) in enumerate(itertools.zip_longest(text, other), 1)
        if piece != another
    ]
    return min(found, default=None)


async def _guesses(rig: Rig) -> tuple[int, int] | None:
    """Tokens drafted and accepted so far, where the server tells."""
    if not isinstance(rig.transport, Daemon):
        return None
    snapshot = await rig.transport.snapshot()
    return snapshot["draft_tokens_total"], snapshot["accepted_draft_tokens_total"]


def show(figures: dict[Contender, dict[str, Figures]], differ: dict[tuple[Contender, str], int]) -> str:
    """Each beside its server's first setting, which guesses nothing.

    Args:
        differ: where texts are first others than the first setting's.
    """
    header = ("", "task", "tok/s", "times without", "tokens", "drafted", "accepted", "text")
    base = {contender.server: found for contender, found in reversed(figures.items())}
    lines = [
        [
            str(contender), task, cell(f.tokens_per_s), cell(f.tokens_per_s / base[contender.server][task].tokens_per_s, 2),
            cell(f.tokens, 0), cell(f.drafted, 0), cell(f.accepted, 0), f"DIFFERS from token {differ[contender, task]}" if (contender, task) in differ else "same",
        ]
        for contender, found in figures.items()
        for task, f in found.items()
    ]  # fmt: skip
    return table(header, lines)


@bench()
@click.option("--questions", type=click.IntRange(1), default=3, help="Of each kind.")
@click.option(
    "--tokens", type=click.IntRange(16), default=1000, help="Most that an answer has; a random model's has as many."
)
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

    Guesses are right or dropped, so a text must be the same as without them, and this says where it is not. For
    the embedded model that is a failure, and exit code 1. A random model chooses between tokens that are nearly
    as likely, and some kernels round a row beside others otherwise than alone. Interleaved runs, each starting its server anew; medians of --repeat.
    """
    place = Place.of(options)
    n, tokens, seed = options["questions"], options["tokens"], options["seed"]
    place.show()

    async def tasks(serving: ServerSettings) -> list[Task]:
        if place.model == EMBEDDED:
            return known_tasks(n, tokens, seed)
        several = attrs.evolve(serving, parallel=TRIED_AT_ONCE, ctx=TRIED_AT_ONCE * serving.ctx)
        async with uma_trio_rig([*uma_trio_flags(several), OFF]) as rig:
            return await random_tasks(rig, n, tokens, seed)

    async def work() -> tuple[str, bool]:
        """The table, and whether a text of ours differs."""
        ctx = 8192 if place.model == EMBEDDED else -(-(2 * WORD_TIMES + tokens) // 256) * 256
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=1, ctx=ctx)
        if options["rival_flags"]:
            show_rival(options["peers"])
        click.echo(f"servers   {serving}\nload      {n} questions of each kind, at most {tokens} tokens, seed {seed}\n")
        asked = await tasks(serving)
        ours = contenders.ours(serving, [" ".join([setting, *options["serve_flags"]]) for setting in (OFF, ON)])
        rivals = contenders.rivals(options["peers"], serving, options["rival_flags"])
        runs: dict[Contender, dict[str, list[Figures]]] = {
            each: {task.name: [] for task in asked} for each in [*ours, *rivals]
        }
        texts: dict[tuple[str, str], Texts] = {}
        differ: dict[tuple[Contender, str], int] = {}
        file = RunsFile(csv_file, ["run", "server", "setting", "task", *NAMES])
        for contender in interleaved(ours, rivals, repeat):
            async with contender.rig() as rig:
                await warm_up(rig)
                for task in asked:
                    figures, said = await run(rig, task, place)
                    runs[contender][task.name].append(figures)
                    at = first_difference(said, texts.setdefault((contender.server, task.name), said))
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
        found = {
            contender: {name: medians(each) for name, each in by_task.items()} for contender, by_task in runs.items()
        }
        return show(found, differ), any(contender.ours for contender, _ in differ)

    shown, differs = carry_out(work)
    click.echo(f"\n{shown}")
    if differs and place.model == EMBEDDED:
        sys.exit(1)


if __name__ == "__main__":
    main()
