"""Kill the engine under load: are all texts right, is anything leaked, and how long do streams pause?

python benches/recovery.py
python benches/recovery.py --count 500 --streams 16 --csv recovery.csv
python benches/recovery.py --kinds sessions --streams 8
python benches/recovery.py --signal stop --hang-timeout-s 1
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import psutil
import trio
from command import Place, bench, carry_out, choices, csv_option, places
from comparison import RunsFile
from held import Held, idle, leaks
from measure import warm_up
from recovery_load import KINDS, LoadedStream, context, streams
from report import cell, quantiles, table
from rigs import Rig, ServerSettings, uma_trio_flags, uma_trio_rig

from uma_trio.demo.load import Daemon

SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "abrt": signal.SIGABRT,
    "stop": signal.SIGSTOP,
}
EXACT: Final = ("--kv-unified", "off", "--flash-attn", "off")
"""A layout in which the last bits of logits do not depend on which cells a sequence has."""
POLL_S: Final = 0.01
"""Interval between two looks at the daemon's count of restarts.  A restart takes ten times as long at least."""
RECOVERY_LIMIT_S: Final = 120.0
"""A recovery that takes longer is a failure."""
SWAP_POLL_S: Final = 0.001
SWAP_LIMIT_S: Final = 10.0
"""How long to wait for a swap before the engine is killed without one."""
OPEN_FILES: Final = {"swap out": ".tmp", "swap in": ".state"}
"""Ends of the names of files that the daemon has open during a swap."""


# -- when the engine is killed ----------------------------------------------------------------------


@attrs.frozen
class Moments:
    """Random moments, and with sessions in turn: any, while a state is swapped out, while one is swapped in."""

    rng: random.Random
    interval_s: float
    daemon: psutil.Process
    has_sessions: bool

    async def wait(self, n: int) -> str:
        """Wait for moment ``n``; returns its name."""
        await trio.sleep(self.rng.uniform(0, self.interval_s))
        name = ("any", "swap out", "swap in")[n % 3] if self.has_sessions else "any"
        if name == "any":
            return name
        with trio.move_on_after(SWAP_LIMIT_S):
            while not self._has_open(OPEN_FILES[name]):  # noqa: ASYNC110 - another process opens the file
                await trio.sleep(SWAP_POLL_S)
            return name
        return "any"

    def _has_open(self, suffix: str) -> bool:
        return any(file.path.endswith(suffix) for file in self.daemon.open_files())


@attrs.frozen(kw_only=True)
class Recovery:
    """One crash.  Times count from the signal."""

    signal: str
    moment: str
    next_token_ms: float
    """Until a stream received a token of the new engine."""
    all_streams_ms: float
    """Until every stream had received one."""


async def crash(daemon: Daemon, name: str, moment: str, load: Sequence[LoadedStream]) -> Recovery:
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
                resumed = [stream.last_token_s for stream in load if stream.last_token_s > restarting]
                if resumed and first is None:
                    first = min(resumed)
                if first is not None and len(resumed) == len(load):
                    return Recovery(
                        signal=name,
                        moment=moment,
                        next_token_ms=1e3 * (first - began),
                        all_streams_ms=1e3 * (max(resumed) - began),
                    )
                await trio.sleep(0.001)
    except trio.TooSlowError:
        raise click.ClickException(f"the streams do not go on {RECOVERY_LIMIT_S:g} s after SIG{name.upper()}") from None


# -- all crashes ------------------------------------------------------------------------------------


@attrs.define
class Report:
    """What happened in all crashes."""

    load: Sequence[LoadedStream]
    recoveries: list[Recovery] = attrs.field(factory=list)
    restarts: int = 0
    swaps: dict[str, int] = attrs.field(factory=dict)
    """Counters of KV offload while the engine was being killed."""
    before: Held = attrs.field(factory=dict)
    """What the idle server held before the first crash."""
    after: Held = attrs.field(factory=dict)
    rss_mib: list[float] = attrs.field(factory=list)
    """Memory of the daemon without its engine after each crash."""

    @property
    def wrong(self) -> list[str]:
        return [text for stream in self.load for text in stream.wrong]

    @property
    def lost(self) -> list[str]:
        return [code for stream in self.load for code in stream.lost]

    @property
    def problems(self) -> list[str]:
        """What is not as it should be, other than texts and lost requests."""
        texts = [f"LEAKED: {name}: {self.before[name]} before, {self.after[name]} after" for name in leaks(self.before, self.after)]  # fmt: skip
        if self.restarts != len(self.recoveries):
            texts.append(f"RESTARTS: {self.restarts} for {len(self.recoveries)} crashes")
        if self.swaps and not (
            self.swaps["loaded_total"] or any(recovery.moment == "swap in" for recovery in self.recoveries)
        ):
            texts.append("NO SWAPS: no session came back from disk; more --streams or a larger --count swap more")
        return texts

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.lost or self.problems)


@attrs.frozen(kw_only=True)
class Test:
    """The crashes."""

    count: int
    signals: Sequence[str]
    interval_s: float
    seed: int

    async def run(self, rig: Rig, load: Sequence[LoadedStream], file: RunsFile) -> Report:
        """Kill the engine ``count`` times while ``load`` runs."""
        daemon, pid = rig.transport, rig.pid
        assert isinstance(daemon, Daemon)
        assert pid is not None
        report = Report(load)
        has_sessions = any(stream.kind == "sessions" for stream in load)
        moments = Moments(random.Random(self.seed), self.interval_s, psutil.Process(pid), has_sessions)
        for stream in load:  # one after another: each text is that of a request alone
            await stream.learn(daemon)
        async with trio.open_nursery() as nursery:
            for stream in load:
                nursery.start_soon(stream.drop_unstable, daemon)
        if unstable := sum(stream.unstable for stream in load):
            click.echo(f"{unstable} conversations are left out: without a crash their answers depend on other streams")
        report.before = await idle(daemon, pid)
        swaps = (await daemon.snapshot())["kv_offload"]
        async with trio.open_nursery() as nursery:
            for stream in load:
                nursery.start_soon(stream.run, daemon)
            await trio.sleep(0.5)
            for n in range(self.count):
                moment = await moments.wait(n)
                recovery = await crash(daemon, self.signals[n % len(self.signals)], moment, load)
                report.recoveries.append(recovery)
                report.rss_mib.append(psutil.Process(pid).memory_info().rss / 2**20)
                file.add(n + 1, recovery.signal, moment, recovery.next_token_ms, recovery.all_streams_ms)
                if (n + 1) % 10 == 0 or n + 1 == self.count:
                    click.echo(
                        f"{n + 1} of {self.count}: {recovery.signal} {recovery.next_token_ms:.0f} ms; "
                        f"{len(report.wrong)} wrong, {len(report.lost)} lost"
                    )
            for stream in load:
                stream.stopping = True
        report.after = await idle(daemon, pid, report.before)
        snapshot = await daemon.snapshot()
        report.restarts = snapshot["engine"]["restarts_total"]
        if has_sessions:
            report.swaps = {
                name: n - swaps[name] for name, n in snapshot["kv_offload"].items() if name.endswith("_total")
            }
        return report


# -- figures ----------------------------------------------------------------------------------------


def show(report: Report) -> str:
    """Tables of pauses, answers and what the server holds, then what is not as it should be."""
    held = [[name, str(report.before[name]), str(n)] for name, n in report.after.items()]
    parts = [
        _pauses(report),
        _answers(report),
        table(("held by the idle server", "before", "after"), held),
        f"restarts  {report.restarts} for {len(report.recoveries)} crashes\n"
        f"memory    {cell(report.rss_mib[0])} MiB after the first crash, {cell(report.rss_mib[-1])} after the last (the daemon)",
    ]
    if report.swaps:
        parts[-1] += (
            f"\nswaps     {report.swaps['saved_total']} states saved, {report.swaps['loaded_total']} loaded; "
            f"{report.swaps['save_failed_total']} not saved, {report.swaps['load_failed_total']} not loaded"
        )
    bad = [*report.problems, *[f"WRONG: {text}" for text in report.wrong[:10]]]
    return "\n\n".join([*parts, *(["\n".join(bad)] if bad else [])])


def _pauses(report: Report) -> str:
    header = ("signal", "crashes", "next token p50 ms", "p95", "p99", "max", "all streams p50 ms", "p95", "p99", "max")
    groups: dict[str, list[Recovery]] = {}
    for recovery in report.recoveries:
        groups.setdefault(f"SIG{recovery.signal.upper()}", []).append(recovery)
    for recovery in report.recoveries:
        groups.setdefault(f"at {recovery.moment}", []).append(recovery)
    groups = {name: group for name, group in groups.items() if len(group) < len(report.recoveries)}
    groups["all"] = report.recoveries
    lines = [
        [
            name,
            str(len(group)),
            *quantiles([recovery.next_token_ms for recovery in group]),
            *quantiles([recovery.all_streams_ms for recovery in group]),
        ]
        for name, group in groups.items()
    ]
    return table(header, lines)


def _answers(report: Report) -> str:
    kinds = {stream.kind: [other for other in report.load if other.kind == stream.kind] for stream in report.load}
    lines = []
    for name, group in [*kinds.items(), ("all", report.load)]:
        lost = Counter(code for stream in group for code in stream.lost)
        wrong = sum(len(stream.wrong) for stream in group)
        answers = sum(stream.answers for stream in group)
        lines.append([name, str(len(group)), str(answers), str(wrong), str(lost.total()), ", ".join(lost)])
    return table(("kind", "streams", "answers", "wrong", "lost", "errors"), lines)


@bench()
@click.option("--count", type=click.IntRange(1), default=100, help="Crashes.")
@click.option(
    "--signal", "name", type=click.Choice(["all", *SIGNALS]), default="all", help="Signal; all: each in turn."
)
@click.option("--kinds", default=",".join(KINDS), help="Kinds of streams, see above.")
@click.option("--streams", "n_streams", type=click.IntRange(1, 32), default=4, help="Streams, of each kind in turn.")
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
def main(csv_file: Path | None, n_streams: int, tokens: int, kinds: str, **options: Any) -> None:
    """Send signals to the engine process while streams run.

    First each question is asked without a crash. Then all streams ask their questions again and again, and the engine
    is killed --count times. Every answer must have the text that it has without a crash, no request may fail, and at
    the end the idle server may hold no more than before: processes, descriptors, shared memory, sequences, cells,
    sessions, files.

    \b
    greedy     one answer to a question
    seeded     the same, drawn with a temperature and a seed
    choices    3 answers to a question (n of 3), drawn
    sessions   3 conversations by turns, of 4 turns each; every second one is drawn

    The server has as many sequences as requests run at a time. So a session that has no turn is swapped out to disk,
    and comes back for its next turn. With sessions, crashes come in turn at any moment, while a state is swapped out
    (the daemon writes its file), and while one is swapped in (the daemon has its file open).

    \b
    next token    from the signal until a stream received a token of the new engine
    all streams   from the signal until every stream had received one

    SIGSTOP includes the time until the daemon notices. The KV cache is per sequence and without flash attention, so that
    texts can be compared exactly. SERVE_FLAGS after -- go to `uma-trio serve`. Exit codes: 0 success, 1 a text was wrong,
    a request was lost, something leaked, or nothing was swapped.
    """
    place = Place.of(options)
    place.show()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signals = list(SIGNALS) if options["name"] == "all" else [options["name"]]
    test = Test(count=options["count"], signals=signals, interval_s=options["interval_s"], seed=options["seed"])
    load = streams(place.model, choices(kinds, "--kinds", KINDS), n_streams, tokens, test.seed)
    parallel = sum(stream.n_sequences for stream in load)
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=parallel, ctx=parallel * context(tokens)
    )
    click.echo(f"server    {serving}\nload      {n_streams} streams, {test.count} crashes, seed {test.seed}\n")
    file = RunsFile(csv_file, ["crash", "signal", "moment", "next_token_ms", "all_streams_ms"])

    async def work() -> Report:
        with tempfile.TemporaryDirectory(prefix="uma-state-") as folder:
            flags = [
                *uma_trio_flags(serving), *EXACT, "--engine", "process", "--state-dir", folder,
                "--engine-hang-timeout-s", str(options["hang_timeout_s"]), *options["serve_flags"],
            ]  # fmt: skip
            async with uma_trio_rig(flags) as rig:
                await warm_up(rig)
                return await test.run(rig, load, file)

    report = carry_out(work)
    click.echo(f"\n{show(report)}")
    sys.exit(not report.is_good)


if __name__ == "__main__":
    main()
