"""Kill the runtime of controllers under load: do other answers change, and how long until controllers work again?

python benches/controllers_recovery.py
python benches/controllers_recovery.py --count 50 --streams 8 --controlled 4 --csv recovery.csv
python benches/controllers_recovery.py --signal stop
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, places
from comparison import RunsFile
from measure import warm_up
from recovery_load import LoadedStream, context, streams
from report import quantiles, table
from rigs import Rig, ServerSettings, uma_trio_flags, uma_trio_rig

from uma_trio.client import Eos, ServerError, Token, open_client
from uma_trio.demo.load import Daemon

SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ENDED: Final = "E_CONTROLLER_UNAVAILABLE"
PROGRAM: Final = "start(async () => { await gen({ regex: /[a-z ]{4000}/, maxTokens: 4000 }) })"
"""Longer than the time to the next signal."""
SHORT_PROGRAM: Final = "start(async () => { await $`It is `; await gen({ regex: /\\d\\d/ }) })"
RECOVERY_LIMIT_S: Final = 120.0
EXACT: Final = ("--kv-unified", "off", "--flash-attn", "off")
"""A layout in which the last bits of logits do not depend on which cells a sequence has."""


@attrs.frozen(kw_only=True)
class Recovery:
    """One crash.  Times count from the signal."""

    signal: str
    noticed_ms: float
    """Until all controlled requests had ended with an error."""
    first_token_ms: float
    """Until a new controlled request had its first sampled token."""
    answered_ms: float
    """Until it had its whole answer."""


@attrs.define
class Controlled:
    """Clients whose requests have a controller; they end with the runtime."""

    daemon: Daemon
    n: int
    seen: int = 0
    """Requests of the current round that have a token."""
    ended: list[str] = attrs.field(factory=list)
    """How those of the current round have ended."""

    async def run(self) -> None:
        """Run a request of each client until all have ended."""
        self.seen, self.ended = 0, []
        async with trio.open_nursery() as nursery:
            for _ in range(self.n):
                nursery.start_soon(self._run_one)

    async def _run_one(self) -> None:
        is_first = True
        try:
            async with open_client(self.daemon.path) as client:
                async for event in client.generate(controller="jsctrl", controller_arg=PROGRAM):
                    if isinstance(event, Token):
                        self.seen += is_first
                        is_first = False
            self.ended.append("no error")
        except ServerError as error:
            self.ended.append(str(error.code))


async def crash(daemon: Daemon, name: str, controlled: Controlled, rng: random.Random) -> Recovery:
    """Send the signal ``name`` to the runtime while controlled requests run, and ask for another answer.

    Raises:
        click.ClickException: there is none within ``RECOVERY_LIMIT_S``, or requests have ended in another way.
    """
    try:
        with trio.fail_after(RECOVERY_LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(controlled.run)
                await trio.sleep(0.001)
                while controlled.seen < controlled.n:  # noqa: ASYNC110 - several tasks count
                    await trio.sleep(0.001)
                await trio.sleep(rng.uniform(0, 0.05))
                pid = (await daemon.snapshot())["controllers"]["pid"]
                began = trio.current_time()
                os.kill(pid, SIGNALS[name])
            noticed_s = trio.current_time() - began
            first_s: float | None = None
            async with open_client(daemon.path) as client:
                async for event in client.generate(controller="jsctrl", controller_arg=SHORT_PROGRAM):
                    if isinstance(event, Token) and not event.inserted and first_s is None:
                        first_s = trio.current_time() - began
                    is_good = isinstance(event, Eos) and event.reason == "stop"
    except trio.TooSlowError:
        raise click.ClickException(f"no answer {RECOVERY_LIMIT_S:g} s after SIG{name.upper()}") from None
    if controlled.ended != [ENDED] * controlled.n or not is_good or first_s is None:
        raise click.ClickException(f"requests ended with {', '.join(controlled.ended)} instead of {ENDED}")
    answered_s = trio.current_time() - began
    return Recovery(signal=name, noticed_ms=1e3 * noticed_s, first_token_ms=1e3 * first_s, answered_ms=1e3 * answered_s)


async def run(
    rig: Rig, load: Sequence[LoadedStream], count: int, names: Sequence[str], n: int, seed: int, file: RunsFile
) -> list[Recovery]:
    """Kill the runtime ``count`` times while ``load`` runs."""
    daemon = rig.transport
    assert isinstance(daemon, Daemon)
    rng, controlled, recoveries = random.Random(seed), Controlled(daemon, n), []
    for stream in load:  # one after another: each text is that of a request alone
        await stream.learn(daemon)
    async with trio.open_nursery() as nursery:
        for stream in load:
            nursery.start_soon(stream.drop_unstable, daemon)
    async with trio.open_nursery() as nursery:
        for stream in load:
            nursery.start_soon(stream.run, daemon)
        for number in range(count):
            recovery = await crash(daemon, names[number % len(names)], controlled, rng)
            recoveries.append(recovery)
            file.add(number + 1, recovery.signal, recovery.noticed_ms, recovery.first_token_ms, recovery.answered_ms)
        for stream in load:
            stream.stopping = True
    return recoveries


def show(recoveries: Sequence[Recovery], load: Sequence[LoadedStream]) -> str:
    """Tables of the times, and of the answers without a controller."""
    lines = []
    for title, field in (
        ("controlled requests have ended", "noticed_ms"),
        ("first sampled token of a new one", "first_token_ms"),
        ("its answer", "answered_ms"),
    ):
        for name in dict.fromkeys(recovery.signal for recovery in recoveries):
            values = [getattr(recovery, field) for recovery in recoveries if recovery.signal == name]
            lines.append([f"{title}, SIG{name.upper()}", str(len(values)), *quantiles(values)])
    wrong, lost = sum(len(stream.wrong) for stream in load), sum(len(stream.lost) for stream in load)
    answers = [["without a controller", str(sum(stream.answers for stream in load)), str(wrong), str(lost)]]
    return "\n\n".join(
        [
            table(("after the signal", "crashes", "p50 ms", "p95", "p99", "max"), lines),
            table(("answers", "number", "wrong", "lost"), answers),
        ]
    )


@bench()
@click.option("--count", type=click.IntRange(1), default=20, help="Crashes.")
@click.option(
    "--signal", "name", type=click.Choice(["all", *SIGNALS]), default="all", help="Signal; all: each in turn."
)
@click.option("--streams", "n_streams", type=click.IntRange(1, 32), default=4, help="Streams without a controller.")
@click.option("--controlled", type=click.IntRange(1, 32), default=4, help="Streams with one.")
@click.option("--tokens", type=click.IntRange(2), default=100, help="Most tokens of an answer without a controller.")
@click.option("--seed", type=int, default=0, help="Seed of the questions and the moments.")
@places()
@csv_option("a row for each crash")
def main(csv_file: Path | None, n_streams: int, controlled: int, tokens: int, **options: Any) -> None:
    """Send signals to the runtime of controllers while streams with and without a controller run.

    Every answer without a controller must have the text that it has alone. Every controlled request that runs must end
    with E_CONTROLLER_UNAVAILABLE, and one that comes at once afterwards must be answered.

    SIGSTOP includes the time until the daemon notices. Exit codes: 0 success, 1 a text was wrong or a request was lost.
    """
    place = Place.of(options)
    place.show()
    names = list(SIGNALS) if options["name"] == "all" else [options["name"]]
    load = streams(place.model, ("greedy", "seeded"), n_streams, tokens, options["seed"])
    parallel = n_streams + controlled
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=parallel, ctx=parallel * max(context(tokens), 4608)
    )
    click.echo(
        f"server    {serving}\nload      {n_streams} streams, {controlled} controlled, {options['count']} crashes\n"
    )
    file = RunsFile(csv_file, ["crash", "signal", "noticed_ms", "first_token_ms", "answered_ms"])

    async def work() -> list[Recovery]:
        async with uma_trio_rig([*uma_trio_flags(serving), *EXACT, "--engine", "process"]) as rig:
            await warm_up(rig)
            return await run(rig, load, options["count"], names, controlled, options["seed"], file)

    click.echo(show(carry_out(work), load))
    sys.exit(any(stream.wrong or stream.lost for stream in load))


if __name__ == "__main__":
    main()
