"""Kill the engine under load: are all texts right, and how long do streams pause?

python benches/recovery.py
python benches/recovery.py --count 500 --streams 8 --csv recovery.csv
python benches/recovery.py --signal stop --hang-timeout-s 1
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import psutil
import trio
from command import Place, bench, carry_out, csv_option, places
from comparison import RunsFile
from measure import WORDS, warm_up
from report import cell, quantiles, table
from rigs import Rig, ServerSettings, room, uma_trio_flags, uma_trio_rig

from uma_trio.client import ServerError
from uma_trio.demo.load import Connection, Daemon
from uma_trio.demo.recording import Question
from uma_trio.models.loaded import EMBEDDED

SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "abrt": signal.SIGABRT,
    "stop": signal.SIGSTOP,
}
QUESTIONS_PER_STREAM: Final = 3
TEMPERATURE: Final = 0.7
"""Every second stream samples at this temperature, with a seed."""
POLL_S: Final = 0.01
"""Interval between two looks at the daemon's count of restarts.  A restart takes ten times as long at least."""
RECOVERY_LIMIT_S: Final = 120.0
"""A recovery that takes longer is a failure."""

ANIMALS: Final = ("a fox", "a bear", "a dog", "a cat", "an owl", "a wolf")
NAMES: Final = ("Ada", "Bo", "Max", "Lily", "Ivo", "Nora", "Otto", "Pia")


def questions(model: Path, n_streams: int, tokens: int, seed: int) -> list[list[Question]]:
    """Return ``QUESTIONS_PER_STREAM`` requests for each stream: greedy, and with a seed in every second stream.

    The embedded model gets questions that it was trained on, so that rounding does not change its answers.
    """
    rng = random.Random(seed)
    if model == EMBEDDED:
        stories = [f"Tell me a story about {animal} named {name}" for animal in ANIMALS for name in NAMES]
        counts = [f"Count from {start} to {start + 60}" for start in range(1, 400, 8)]
        texts = [text for pair in zip(rng.sample(stories, 48), rng.sample(counts, 48), strict=True) for text in pair]
        asked = [Question(text=text, max_tokens=tokens) for text in texts]
    else:
        asked = [
            Question(text=" ".join(rng.choices(WORDS, k=64)), raw=True, max_tokens=tokens, ignore_eos=True)
            for _ in range(QUESTIONS_PER_STREAM * n_streams)
        ]
    of_stream = itertools.cycle(asked)
    return [
        [
            attrs.evolve(next(of_stream), temperature=TEMPERATURE if n % 2 else 0.0, seed=n)
            for _ in range(QUESTIONS_PER_STREAM)
        ]
        for n in range(n_streams)
    ]


@attrs.define
class LoadedStream:
    """A client that repeats its questions until ``stopping`` is set, and checks every answer."""

    questions: Sequence[Question]
    expected: dict[str, str] = attrs.field(factory=dict)
    """Question -> the answer without a crash."""
    stopping: bool = False
    last_token_s: float = 0.0
    answers: int = 0
    wrong: list[str] = attrs.field(factory=list)
    """Differences between an answer and the expected one."""
    lost: list[str] = attrs.field(factory=list)
    """Error codes of requests that failed."""
    unstable: int = 0
    """Questions that are not asked, since their answers differ without a crash."""

    async def learn(self, rig: Rig) -> None:
        """Record the answer to each question."""
        async with rig.transport.connect(interactive=True) as connection:
            for question in self.questions:
                self.expected[question.text] = await self._ask(connection, question)

    async def drop_unstable(self, rig: Rig) -> None:
        """Ask each question once more, next to the other streams, and drop those with another answer.

        The logits depend in their last bits on the other sequences of a batch, which matters to models whose best tokens
        are almost equally likely.
        """
        stable = []
        async with rig.transport.connect(interactive=True) as connection:
            for question in self.questions:
                if await self._ask(connection, question) == self.expected[question.text]:
                    stable.append(question)
        self.unstable = len(self.questions) - len(stable)
        if not stable:
            raise click.ClickException("all answers of a stream depend on the batch: there is nothing to compare with")
        self.questions = stable

    async def run(self, rig: Rig) -> None:
        """Ask until ``stopping`` is set; the answer of that moment is completed and checked too."""
        for question in itertools.cycle(self.questions):
            if self.stopping:
                return
            async with rig.transport.connect(interactive=True) as connection:
                try:
                    text = await self._ask(connection, question)
                except ServerError as error:
                    self.lost.append(str(error.code))
                    await trio.sleep(POLL_S)
                    continue
            self.answers += 1
            if text != self.expected[question.text]:
                self.wrong.append(_difference(self.expected[question.text], text))

    async def _ask(self, connection: Connection, question: Question) -> str:
        texts: list[str] = []

        def on_token(text: str) -> None:
            self.last_token_s = trio.current_time()
            texts.append(text)

        await connection.ask(question, on_token)
        return "".join(texts)


def _difference(expected: str, found: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(found))
    return f"character {at}: {found[at : at + 40]!r} instead of {expected[at : at + 40]!r}"


@attrs.frozen(kw_only=True)
class Recovery:
    """One crash.  Times count from the signal."""

    signal: str
    next_token_ms: float
    """Until a stream received a token of the new engine."""
    all_streams_ms: float
    """Until every stream had received one."""


@attrs.define
class Report:
    """What happened in all crashes."""

    recoveries: list[Recovery] = attrs.field(factory=list)
    answers: int = 0
    wrong: list[str] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)
    restarts: int = 0
    fds: tuple[int, int] = (0, 0)
    """File descriptors of the daemon after the first crash and after the last one."""
    rss_mib: tuple[float, float] = (0.0, 0.0)
    """Memory of the daemon without its engine, likewise."""

    @property
    def is_good(self) -> bool:
        return not self.wrong and not self.lost and self.restarts == len(self.recoveries)


@attrs.frozen(kw_only=True)
class Test:
    """The load and the crashes."""

    count: int
    signals: Sequence[str]
    interval_s: float
    seed: int

    async def run(self, rig: Rig, streams: Sequence[LoadedStream], file: RunsFile) -> Report:
        """Kill the engine ``count`` times while ``streams`` run."""
        assert isinstance(rig.transport, Daemon)
        assert rig.pid is not None
        rng, report, daemon = random.Random(self.seed), Report(), psutil.Process(rig.pid)
        for each in streams:  # one after another: each text is that of a request alone
            await each.learn(rig)
        async with trio.open_nursery() as nursery:
            for each in streams:
                nursery.start_soon(each.drop_unstable, rig)
        unstable = sum(each.unstable for each in streams)
        if unstable:
            click.echo(f"{unstable} questions are left out: without a crash their answers depend on the other streams")
        async with trio.open_nursery() as nursery:
            for each in streams:
                nursery.start_soon(each.run, rig)
            await trio.sleep(0.5)
            for n in range(self.count):
                await trio.sleep(rng.uniform(0, self.interval_s))
                name = self.signals[n % len(self.signals)]
                found = await crash(rig.transport, name, streams)
                report.recoveries.append(found)
                file.add(n + 1, name, found.next_token_ms, found.all_streams_ms)
                size = daemon.num_fds(), daemon.memory_info().rss / 2**20
                if n == 0:
                    report.fds, report.rss_mib = (size[0], size[0]), (size[1], size[1])
                report.fds, report.rss_mib = (report.fds[0], size[0]), (report.rss_mib[0], size[1])
                if (n + 1) % 10 == 0 or n + 1 == self.count:
                    wrong, lost = (sum(len(getattr(s, key)) for s in streams) for key in ("wrong", "lost"))
                    click.echo(
                        f"{n + 1} of {self.count}: {name} {found.next_token_ms:.0f} ms; {wrong} wrong, {lost} lost"
                    )
            for each in streams:
                each.stopping = True
        report.restarts = (await rig.transport.snapshot())["engine"]["restarts_total"]
        for each in streams:
            report.answers += each.answers
            report.wrong += each.wrong
            report.lost += each.lost
        return report


async def crash(daemon: Daemon, name: str, streams: Sequence[LoadedStream]) -> Recovery:
    """Send the signal ``name`` to the engine, and wait until every stream goes on.

    Raises:
        click.ClickException: they do not go on within ``RECOVERY_LIMIT_S``.
    """
    engine = (await daemon.snapshot())["engine"]
    began = trio.current_time()
    os.kill(engine["pid"], SIGNALS[name])
    try:
        with trio.fail_after(RECOVERY_LIMIT_S):
            while (await daemon.snapshot())["engine"]["restarts_total"] == engine["restarts_total"]:  # noqa: ASYNC110 - another process counts
                await trio.sleep(POLL_S)
            restarting = trio.current_time()  # tokens that arrive from here on are those of the new engine
            first: float | None = None
            while True:
                resumed = [stream.last_token_s for stream in streams if stream.last_token_s > restarting]
                if resumed and first is None:
                    first = min(resumed)
                if first is not None and len(resumed) == len(streams):
                    return Recovery(
                        signal=name, next_token_ms=1e3 * (first - began), all_streams_ms=1e3 * (max(resumed) - began)
                    )
                await trio.sleep(0.001)
    except trio.TooSlowError:
        raise click.ClickException(f"the streams do not go on {RECOVERY_LIMIT_S:g} s after SIG{name.upper()}") from None


def show(report: Report) -> str:
    """A row for each signal and one for all, then the counts."""
    header = ("signal", "crashes", "next token p50 ms", "p95", "p99", "max", "all streams p50 ms", "p95", "p99", "max")
    names = sorted({each.signal for each in report.recoveries})
    groups = {f"SIG{name.upper()}": [each for each in report.recoveries if each.signal == name] for name in names}
    if len(names) > 1:
        groups["all"] = report.recoveries
    lines = [
        [
            name,
            str(len(group)),
            *quantiles([each.next_token_ms for each in group]),
            *quantiles([each.all_streams_ms for each in group]),
        ]
        for name, group in groups.items()
    ]
    counts = [
        f"answers   {report.answers} complete, {len(report.wrong)} with another text",
        f"lost      {len(report.lost)} requests {dict(Counter(report.lost)) or ''}".rstrip(),
        f"restarts  {report.restarts} for {len(report.recoveries)} crashes",
        f"daemon    {report.fds[0]} file descriptors after the first crash, {report.fds[1]} after the last; "
        f"{cell(report.rss_mib[0])} and {cell(report.rss_mib[1])} MiB",
    ]
    return "\n".join([table(header, lines), "", *counts, *[f"WRONG: {text}" for text in report.wrong[:10]]])


@bench()
@click.option("--count", type=click.IntRange(1), default=100, help="Crashes.")
@click.option(
    "--signal", "name", type=click.Choice(["all", *SIGNALS]), default="all", help="Signal; all: each in turn."
)
@click.option("--streams", "n_streams", type=click.IntRange(1, 32), default=4, help="Streams at a time.")
@click.option("--tokens", type=click.IntRange(2), default=300, help="Most tokens of an answer.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(0), default=0.5, help="Longest time from a recovery to the next crash, in s."
)  # fmt: skip
@click.option(
    "--hang-timeout-s", type=click.FloatRange(1), default=5.0, help="Of the daemon: for an engine that hangs."
)
@click.option("--seed", type=int, default=0, help="Seed of the questions and the moments.")
@places()
@csv_option("a row for each crash")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(csv_file: Path | None, n_streams: int, tokens: int, **options: Any) -> None:
    """Send signals to the engine process at random moments while streams run.

    First each question is asked without a crash.  Then all streams ask their questions again and again, and the engine
    is killed --count times.  Every answer must have the text that it has without a crash, and no request may fail.
    SERVE_FLAGS after -- go to `uma-trio serve`.

    \b
    next token    from the signal until a stream received a token of the new engine
    all streams   from the signal until every stream had received one

    SIGSTOP includes the time until the daemon notices.  Exit codes: 0 success, 1 a text was wrong or a request lost.
    """
    place = Place.of(options)
    place.show()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signals = list(SIGNALS) if options["name"] == "all" else [options["name"]]
    test = Test(count=options["count"], signals=signals, interval_s=options["interval_s"], seed=options["seed"])
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=n_streams, ctx=n_streams * room(64, tokens)
    )
    flags = [
        *uma_trio_flags(serving), "--engine", "process", "--engine-hang-timeout-s", str(options["hang_timeout_s"]),
        *options["serve_flags"],
    ]  # fmt: skip
    asked = questions(place.model, n_streams, tokens, test.seed)
    click.echo(f"server    {serving}\nload      {n_streams} streams, {test.count} crashes, seed {test.seed}\n")
    file = RunsFile(csv_file, ["crash", "signal", "next_token_ms", "all_streams_ms"])

    async def work() -> Report:
        async with uma_trio_rig(flags) as rig:
            await warm_up(rig)
            return await test.run(rig, [LoadedStream(each) for each in asked], file)

    report = carry_out(work)
    click.echo(f"\n{show(report)}")
    sys.exit(not report.is_good)


if __name__ == "__main__":
    main()
