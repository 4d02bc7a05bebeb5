"""Answers of a mixed load, computed again from the perf log: how many are equal?

python benches/replays.py
python benches/replays.py --answers 1000 -- --reproducible
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from command import Place, bench, carry_out, places
from measure import WORDS
from pinning import pinned
from report import table
from rigs import ServerSettings, uma_trio_flags

from uma_trio.cli.perf import read_logs
from uma_trio.cli.replay import ask_again
from uma_trio.client import open_client
from uma_trio.demo.temporary_daemon import temporary_daemon
from uma_trio.telemetry.replays import Comparison, Logged, compare, find

HEAD: Final = "A long beginning that many prompts share, so that one computes it for all of them. "
SIZES: Final = (4, 30, 120, 400)
"""Words of a prompt after its beginning."""
DRAWN: Final[Sequence[dict[str, Any]]] = ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20})
CONTEXT: Final = 2048
LOG_S: Final = 60.0
"""Longest wait for the log."""


@attrs.frozen
class Replayed:
    """An answer, and how it compares with itself computed again."""

    logged: Logged
    comparison: Comparison

    @property
    def was_shared(self) -> bool:
        """Whether it was computed together with others."""
        return self.logged.replay.steps_shared > 0

    @property
    def was_cached(self) -> bool:
        """Whether the beginning of its prompt was in the KV cache."""
        return self.logged.replay.cached_tokens > 0


def requests(n: int, seed: int = 7) -> Iterator[dict[str, Any]]:
    """Requests of mixed sizes and sampling parameters, some with prompts that begin alike."""
    rng = random.Random(seed)
    for index in range(n):
        text = HEAD * rng.choice((0, 2)) + " ".join(rng.choices(WORDS, k=rng.choice(SIZES)))
        fields = {"id": f"r{index}", "prompt": text, "max_tokens": rng.choice((4, 16, 60)), "seed": index}
        yield {**fields, **rng.choice(DRAWN)}


async def answer_all(path: Path, asked: Sequence[dict[str, Any]], streams: int) -> None:
    """Have all requests answered, ``streams`` at a time."""
    left = iter(asked)

    async def stream() -> None:
        async with open_client(path) as client:
            for fields in left:
                async for _ in client.generate(**fields, keep_alive=True):
                    pass

    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(stream)


async def logged(log: Path, names: Sequence[str]) -> list[Logged]:
    """These answers of the log, when they are there."""
    with trio.fail_after(LOG_S):
        while True:
            runs = read_logs([log])
            answers = [answer for name in names if (answer := find(runs, name)) is not None]
            if len(answers) == len(names):
                return answers
            await trio.sleep(0.2)


async def replayed(path: Path, log: Path, names: Sequence[str]) -> list[Replayed]:
    """Answers of the log, compared with themselves computed again, one after the other."""
    before = await logged(log, names)
    again = await logged(log, [await ask_again(answer.replay.fields, str(path)) for answer in before])
    return [Replayed(was, compare(was, now)) for was, now in zip(before, again, strict=True)]


def show(answers: Sequence[Replayed]) -> str:
    """Counts of all answers, and where the first ones differ."""
    different = [answer.comparison for answer in answers if not answer.comparison.equal]
    shared, cached = (sum(answer.was_shared for answer in answers), sum(answer.was_cached for answer in answers))
    counts = [[str(len(answers)), str(shared), str(cached), str(len(different))]]
    header = ("answers", "in batches with others", "with a cached beginning", "differ")
    lines = [
        f"token {comparison.differs_at} of {comparison.n_tokens}: {'; '.join(comparison.causes)}"
        for comparison in different[:5]
    ]
    return "\n".join([table(header, counts), *lines])


@bench()
@click.option("--answers", type=click.IntRange(1), default=150, help="Answers.")
@click.option("--streams", type=click.IntRange(1), default=12, help="Requests at a time.")
@click.option("--seed", type=int, default=7, help="Seed of the requests.")
@places()
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(serve_flags: Sequence[str], **options: Any) -> None:
    """Compute answers of a mixed load again, each alone and without the cache of others.

    Prompts have 4 to 400 words, and half of them begin alike. A third of the answers is greedy. SERVE_FLAGS after -- go to
    `uma-trio serve`, such as --reproducible or --flash-attn on. The exit code is 1 if an answer differs.
    """
    place = Place.of(options)
    place.show()
    asked, streams = [*requests(options["answers"], options["seed"])], options["streams"]

    async def work() -> list[Replayed]:
        with tempfile.TemporaryDirectory(prefix="uma-replays-") as folder:
            log = Path(folder) / "perf.jsonl"
            serving = ServerSettings(model=place.model, threads=place.threads, parallel=8, ctx=8 * CONTEXT)
            flags = ["--perf-log", str(log), "--perf-log-replay", "prompts", *serve_flags]
            async with temporary_daemon([*uma_trio_flags(serving), *flags]) as daemon:
                with pinned(daemon.pid, place.pins):
                    await answer_all(daemon.path, asked, streams)
                    return await replayed(daemon.path, log, [fields["id"] for fields in asked])

    answers = carry_out(work)
    click.echo(show(answers))
    sys.exit(not all(answer.comparison.equal for answer in answers))


if __name__ == "__main__":
    main()
