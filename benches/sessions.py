"""Conversations that come back: from the cache, from disk, or computed again; and many more of them than there is room for.

python benches/sessions.py --model /tmp/125m.gguf --threads 1
python benches/sessions.py --model /tmp/125m.gguf --threads 1 --churn
python benches/sessions.py --churn --sessions 40 --turns 3 --hour 0.01
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, places, repeat_option
from comparison import RunsFile
from processes import rss_bytes
from prompts import of_tokens
from report import cell, table
from rigs import Rig, ServerSettings, uma_trio_flags, uma_trio_rig

from uma_trio.client import Client, Eos, ServerError, Token, open_client
from uma_trio.engine.tokenizer import Tokenizer
from uma_trio.models.loaded import vocabulary

SPILL_NOW = ("--offload-after-s", "0")
"""So that nobody has to wait for it."""

SAMPLE_S = 0.25
MB = 1e6


# -- cold, warm, restored ---------------------------------------------------------------------------


async def ttft(client: Client, session: str, prompt: str, tokens: int = 4) -> tuple[float, Eos]:
    """Milliseconds from sending to the first token, as the client sees it, and the last event."""
    began, first = time.perf_counter(), math.nan
    async for event in client.generate(
        prompt=prompt, session_id=session, max_tokens=tokens, ignore_eos=True, keep_alive=True
    ):
        if isinstance(event, Token) and math.isnan(first):
            first = 1e3 * (time.perf_counter() - began)
    assert isinstance(event, Eos)
    return first, event


async def spilled(client: Client, n: int) -> dict[str, Any]:
    """The server's counters, when it has saved so many states."""
    with trio.fail_after(120):
        while True:
            await client.send({"type": "metrics", "keep_alive": True})
            found: dict[str, Any] = (await client.receive()).snapshot["spill"]
            if found["saved_total"] + found["failed_total"] + found["skipped_total"] >= n:
                return found
            await trio.sleep(0.05)


@attrs.define
class Times:
    """Of one session."""

    cold_ms: float
    warm_ms: float
    restored_ms: float = math.nan
    restored_tokens: int = 0
    state_mb: float = math.nan


async def three_ways(
    serving: ServerSettings, texts: Sequence[str], state: Path, spill_mb: int
) -> tuple[list[Times], dict[str, Any]]:
    """Each text a session: begun, gone on with, and gone on with in a server that was started anew; what the first saved."""
    flags = [*uma_trio_flags(serving), "--state-dir", str(state), "--offload-max-mb", str(spill_mb), *SPILL_NOW]
    found = []
    async with uma_trio_rig(flags) as rig, open_client(path_of(rig)) as client:
        await ttft(client, "warm up", "Hello")
        for n, text in enumerate(texts):
            cold, _ = await ttft(client, f"s{n}", text)
            warm, last = await ttft(client, f"s{n}", " and then")
            if last.usage.cached_tokens < len(text.split()):
                raise click.ClickException(f"the session was not in the cache: {last.usage}")
            found.append(Times(cold, warm))
        saved = await spilled(client, len(texts))
    async with uma_trio_rig(flags) as rig, open_client(path_of(rig)) as client:
        await ttft(client, "warm up", "Hello")
        before = 0
        for n, times in enumerate(found):
            times.restored_ms, last = await ttft(client, f"s{n}", " and then")
            times.restored_tokens = last.usage.cached_tokens
            counted = await spilled(client, 0)
            times.state_mb = (counted["loaded_bytes_total"] - before) / MB
            before = counted["loaded_bytes_total"]
    return found, saved


def path_of(rig: Rig) -> Path:
    return Path(rig.transport.path)  # type: ignore[attr-defined]


def show(times: Sequence[Times], saved: dict[str, Any]) -> str:
    def of(name: str) -> list[float]:
        return [getattr(one, name) for one in times]

    cold = statistics.median(of("cold_ms"))
    lines = [
        [name, cell(statistics.median(of(key))), cell(max(of(key))), f"{statistics.median(of(key)) / cold:.2%}"]
        for name, key in (("cold", "cold_ms"), ("in the cache", "warm_ms"), ("after a restart", "restored_ms"))
    ]
    read = [one.state_mb for one in times if one.state_mb]
    what = f", {statistics.median(read):,.1f} MB of {times[0].restored_tokens} tokens each" if read else ""
    return (
        f"{table(('session', 'TTFT p50 ms', 'max', 'of cold'), lines)}\n\n"
        f"saved {saved['saved_total']}, not worth it {saved['skipped_total']}, failed {saved['failed_total']}; "
        f"after a restart {len(read)} of {len(times)} were read{what}"
    )


# -- more than there is room for --------------------------------------------------------------------


@attrs.define
class Talker:
    """One user's conversation."""

    name: str
    texts: list[str]
    tokens: int = 0
    """That the session should have."""
    turns: int = 0
    ttft_ms: list[float] = attrs.field(factory=list)
    cached: list[float] = attrs.field(factory=list)
    """Shares of its later prompts that were not computed."""
    lost: list[str] = attrs.field(factory=list)


async def talk(talker: Talker, path: Path, starts: Sequence[float], answer: int, began: float) -> None:
    for n, (text, start) in enumerate(zip(talker.texts, starts, strict=True)):
        await trio.sleep_until(began + start)
        async with open_client(path) as client:
            try:
                first, last = await ttft(client, talker.name, text, answer)
            except ServerError as error:
                talker.lost.append(f"turn {n + 1}: {error}")
                continue
        usage, session = last.usage, last.session
        talker.ttft_ms.append(first)
        if n:
            talker.cached.append(usage.cached_tokens / talker.tokens)
            if usage.prompt_tokens <= talker.tokens:
                talker.lost.append(f"turn {n + 1}: its prompt has {usage.prompt_tokens} of {talker.tokens} tokens")
        talker.tokens, talker.turns = session.tokens, talker.turns + 1
        if (session.turns, session.durable) != (talker.turns, True):
            talker.lost.append(f"turn {n + 1}: {session}")


@attrs.define
class Watch:
    """What was seen of the server while they talked."""

    cells: int = 0
    most_cells: int = 0
    most_saved_mb: float = 0.0
    rss_mb: list[float] = attrs.field(factory=list)
    last: dict[str, Any] = attrs.field(factory=dict)

    async def run(self, path: Path, pid: int | None) -> None:
        while True:
            async with open_client(path) as client:
                self.last = await client.metrics()
            kv = self.last["kv"]
            self.cells = kv["cells"]
            self.most_cells = max(self.most_cells, kv["cells_reserved"] + kv["cached_cells"])
            self.most_saved_mb = max(self.most_saved_mb, kv["saved_bytes"] / MB)
            if pid is not None:
                self.rss_mb.append(rss_bytes(pid) / MB)
            await trio.sleep(SAMPLE_S)


async def churn(
    serving: ServerSettings, talkers: list[Talker], hour_s: float, answer: int, state: Path, spill_mb: int, seed: int
) -> Watch:
    """All of them talk, each turn at a random moment of the hour."""
    rng = random.Random(seed)
    flags = [
        *uma_trio_flags(serving),
        "--state-dir",
        str(state),
        "--offload-max-mb",
        str(spill_mb),
        "--max-queue",
        "1000",
        "--max-connections",
        "1000",
    ]
    watch = Watch()
    async with uma_trio_rig(flags) as rig:
        path, began = path_of(rig), trio.current_time()
        async with trio.open_nursery() as watching:
            watching.start_soon(watch.run, path, rig.pid)
            async with trio.open_nursery() as nursery:
                for talker in talkers:
                    starts = sorted(rng.uniform(0, hour_s) for _ in talker.texts)
                    nursery.start_soon(talk, talker, path, starts, answer, began)
            await trio.sleep(2 * SAMPLE_S)
            watching.cancel_scope.cancel()
    return watch


def tell(talkers: Sequence[Talker], watch: Watch, wall_s: float) -> None:
    lost = [f"{talker.name}, {why}" for talker in talkers for why in talker.lost]
    ttft_ms = sorted(ms for talker in talkers for ms in talker.ttft_ms)
    cached = [share for talker in talkers for share in talker.cached]
    spill, tick_ms = watch.last["spill"], watch.last["decode_ms_avg"]
    click.echo(
        f"sessions      {len(talkers)}, {sum(t.turns for t in talkers)} turns in {wall_s:.0f} s, {sum(t.tokens for t in talkers):,} tokens at the end"
    )
    click.echo(f"lost          {len(lost)}")
    click.echo(f"cells         {watch.most_cells:,} of {watch.cells:,} at most")
    click.echo(f"on disk       {watch.most_saved_mb:,.0f} MB at most")
    if watch.rss_mb:
        later = watch.rss_mb[len(watch.rss_mb) // 4 :]
        click.echo(
            f"RSS           {later[0]:,.0f} MB after a quarter, {max(later):,.0f} at most, {later[-1]:,.0f} at the end"
        )
    click.echo(
        f"TTFT          p50 {statistics.median(ttft_ms):,.0f}, p95 {ttft_ms[int(0.95 * len(ttft_ms))]:,.0f}, max {ttft_ms[-1]:,.0f} ms"
    )
    click.echo(f"not computed  {statistics.fmean(cached):.0%} of what was said before, on average")
    click.echo(
        f"saved         {spill['saved_total']} states, {spill['saved_bytes_total'] / MB:,.0f} MB; {spill['failed_total']} failed, {spill['skipped_total']} are quicker to compute"
    )
    click.echo(
        f"loaded        {spill['loaded_total']} states, {spill['loaded_bytes_total'] / MB:,.0f} MB; {spill['unusable_total']} not"
    )
    click.echo(
        f"longest stall {spill['stall_max_ms']} ms (p50 {spill['stall_p50_ms']}, p99 {spill['stall_p99_ms']}); a tick takes {tick_ms:.1f} ms on average"
    )
    for line in lost[:20]:
        click.echo(f"LOST: {line}", err=True)
    if lost:
        raise click.ClickException(f"{len(lost)} turns went wrong")


def texts_of(tokenizer: Tokenizer, rng: random.Random, turns: int, first: int, later: int) -> list[str]:
    spread = [first, *[later] * (turns - 1)]
    return [of_tokens(tokenizer, rng, max(4, int(n * rng.uniform(0.5, 1.5)))) for n in spread]


@bench()
@click.option("--tokens", type=click.IntRange(32), default=4000, help="Of each session, without --churn.")
@click.option("--churn", "churns", is_flag=True, help="Many sessions in too little room, instead.")
@click.option("--sessions", type=click.IntRange(1), default=500, help="With --churn: how many.")
@click.option("--room", type=click.IntRange(1), default=20, help="With --churn: sequences that there are.")
@click.option("--turns", type=click.IntRange(1), default=4, help="With --churn: of each session.")
@click.option(
    "--first", type=click.IntRange(4), default=400, help="With --churn: tokens of the first prompt, on average."
)
@click.option("--later", type=click.IntRange(4), default=60, help="With --churn: of each later one.")
@click.option("--answer", type=click.IntRange(1), default=24, help="With --churn: tokens generated in a turn.")
@click.option(
    "--hour", type=click.FloatRange(0.001), default=0.1, help="With --churn: how long the hour lasts, in hours."
)
@click.option("--spill-mb", type=click.IntRange(1), default=8192, help="Most megabytes of states on disk.")
@click.option(
    "--state-dir", type=click.Path(file_okay=False, path_type=Path), help="Where to; a temporary folder if not given."
)
@click.option("--seed", type=int, default=0, help="Of words and moments.")
@places()
@repeat_option(5, "Sessions, without --churn.")
@csv_option("a row for each session")
def main(repeat: int, csv_file: Path | None, **options: Any) -> None:
    """Sessions in the cache, on disk, and computed again.

    Without --churn: how long the first token of a session's next turn takes where its first prompt was never seen
    (cold), where its sequence is still in the cache, and where the server was started anew and reads it from disk.

    With --churn: --sessions conversations of --turns each, at random moments of a compressed hour, in a server with
    --room sequences. Every answer is checked: nothing of what was said may be missing. Ends with 1 if something is.
    """
    place = Place.of(options)
    place.show()
    rng = random.Random(options["seed"])
    with vocabulary(place.model) as tokenizer, tempfile.TemporaryDirectory(dir=options["state_dir"]) as folder:
        if options["churns"]:
            _churn(place, options, tokenizer, rng, Path(folder), csv_file)
            return
        texts = [of_tokens(tokenizer, rng, options["tokens"]) for _ in range(repeat)]
        window = -(-(options["tokens"] + 64) // 256) * 256
        serving = ServerSettings(
            model=place.model, threads=place.threads, parallel=repeat + 1, ctx=(repeat + 1) * window
        )
        click.echo(
            f"server    {serving}\nload      {repeat} sessions of {options['tokens']} tokens, seed {options['seed']}\n"
        )

        async def work() -> tuple[list[Times], dict[str, Any]]:
            return await three_ways(serving, texts, Path(folder), options["spill_mb"])

        times, saved = carry_out(work)
        file = RunsFile(csv_file, ["session", *[field.name for field in attrs.fields(Times)]])
        for n, one in enumerate(times, 1):
            file.add(n, *attrs.astuple(one))
        click.echo(show(times, saved))


def _churn(
    place: Place, options: dict[str, Any], tokenizer: Tokenizer, rng: random.Random, folder: Path, csv_file: Path | None
) -> None:
    turns, answer = options["turns"], options["answer"]
    talkers = [
        Talker(f"talk {n}", texts_of(tokenizer, rng, turns, options["first"], options["later"]))
        for n in range(options["sessions"])
    ]
    most = 1.5 * (options["first"] + (turns - 1) * options["later"]) + turns * (answer + 2)
    window = -(-int(most + 64) // 256) * 256
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=options["room"], ctx=options["room"] * window
    )
    hour_s = 3600 * options["hour"]
    click.echo(
        f"server    {serving}\nload      {len(talkers)} sessions of {turns} turns in {hour_s:.0f} s, {options['first']} tokens first, "
        f"{options['later']} later, {answer} generated, seed {options['seed']}\n"
    )
    began = time.perf_counter()

    async def work() -> Watch:
        return await churn(serving, talkers, hour_s, answer, folder, options["spill_mb"], options["seed"])

    watch = carry_out(work)
    file = RunsFile(csv_file, ["session", "turns", "tokens", "ttft_p50_ms", "cached_share"])
    for talker in talkers:
        share = statistics.fmean(talker.cached) if talker.cached else math.nan
        file.add(talker.name, talker.turns, talker.tokens, statistics.median(talker.ttft_ms), share)
    tell(talkers, watch, time.perf_counter() - began)


if __name__ == "__main__":
    main()
