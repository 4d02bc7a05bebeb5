"""Short streams that somebody watches, beside long prompts: does anybody freeze, and what does it cost?

    python benches/mixed_load.py
    python benches/mixed_load.py --model /tmp/125m.gguf --threads 2 --tokens 400 --long 5 --long-words 1500
    python benches/mixed_load.py --csv tokens.csv -- --no-kv-unified --parallel 8
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import psutil
import trio
from machine import machine
from report import cell, quantiles, table, write_csv

from uma_trio.cli.running import run
from uma_trio.client import ClientError
from uma_trio.demo import load
from uma_trio.demo.own_daemon import Interrupted, NoDaemon, own_daemon, until_interrupted
from uma_trio.demo.recording import (
    Question,
    Stream,
    Track,
    arrivals,
    lengths_ms,
    possible_switches,
    reading_windows,
    switches,
    within,
)
from uma_trio.demo.scorecard import Counters
from uma_trio.engine.cores import default_threads

WORDS = ["the", "a", "of", "and", "to", "in", "is", "was", "on", "for", "with", "by", "from", "at", "as", "that", "it", "his", "her", "they", "are", "this", "have", "had", "not", "but", "all", "one", "two", "can", "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea", "body", "information", "back", "parent", "face", "others", "level", "office", "door", "health", "person", "art", "war", "history", "party", "result", "change", "morning", "reason", "research", "girl", "guy", "moment", "air", "teacher"]

SHORT_WORDS = 20
"""Of an interactive stream's prompt."""


@attrs.frozen(kw_only=True)
class Load:
    """What is asked of the server."""

    streams: int
    tokens: int
    long: int
    long_words: int
    long_tokens: int
    long_after: int
    seed: int

    def make(self) -> list[Stream]:
        """Raw prompts of common words, all different, and exact token counts: any model can serve them."""
        rng = random.Random(self.seed)

        def stream(name: str, words: int, tokens: int, *, interactive: bool) -> Stream:
            text = " ".join(rng.choices(WORDS, k=words))
            question = Question(text=text, raw=True, max_tokens=tokens, ignore_eos=True)
            return Stream(name=name, questions=(question,), interactive=interactive)

        return [
            *(stream(f"s{n}", SHORT_WORDS, self.tokens, interactive=True) for n in range(1, self.streams + 1)),
            *(stream(f"long{n}", self.long_words, self.long_tokens, interactive=False) for n in range(1, self.long + 1)),
        ]  # fmt: skip


@attrs.frozen(kw_only=True)
class Rig:
    """A server under test: how to reach it, which process it is, what to call it.

    A rival is another function that yields one of these.
    """

    transport: load.Transport
    pid: int | None
    description: str


@contextlib.asynccontextmanager
async def uma_trio_rig(options: dict[str, Any]) -> AsyncIterator[Rig]:
    """The daemon at --socket, or one of our own for as long as this lasts."""
    async with contextlib.AsyncExitStack() as stack:
        if options["socket"] is not None:
            path, pid, flags = options["socket"], peer_pid(options["socket"]), "as it was started"
        else:
            given = serve_flags(options)
            own = await stack.enter_async_context(own_daemon(given))
            path, pid, flags = own.path, own.pid, " ".join(given) or "no flags"
            if options["threads"] is None:
                flags += f", threads {default_threads()} by default"
        daemon = load.Daemon(path, options["protocol"])
        snapshot = await daemon.snapshot()
        size = model_size(options["model"])
        description = f"uma-trio serve ({flags}), model {snapshot['model']}{size}, {options['protocol']}"
        yield Rig(transport=daemon, pid=pid, description=description)


def serve_flags(options: dict[str, Any]) -> list[str]:
    flags = []
    if options["model"] is not None:
        flags += ["--model", str(options["model"])]
    if options["threads"] is not None:
        flags += ["--threads", str(options["threads"])]
    return [*flags, *options["serve_flags"]]


def model_size(path: Path | None) -> str:
    return "" if path is None else f", {path.stat().st_size / 2**20:.0f} MiB"


def peer_pid(path: str) -> int | None:
    """The process that listens at ``path``, where the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return None  # the client says it better
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(pid)


@attrs.frozen(kw_only=True)
class Cpu:
    """Seconds of processor time so far."""

    us: float
    server: float | None
    machine: float
    """Of everybody."""

    @classmethod
    def now(cls, pid: int | None) -> Cpu:
        everybody = psutil.cpu_times()
        return cls(
            us=_busy(psutil.Process()),
            server=None if pid is None else _busy(psutil.Process(pid)),
            machine=sum(everybody) - everybody.idle - getattr(everybody, "iowait", 0.0),
        )


def _busy(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@attrs.frozen(kw_only=True)
class Result:
    """All that was measured."""

    tracks: list[Track]
    wall_s: float
    counted: Counters | None
    before: Cpu
    after: Cpu


async def measure(rig: Rig, asked: Load) -> Result:
    counters = await rig.transport.counters()
    before, began = Cpu.now(rig.pid), trio.current_time()
    tracks = await load.together(asked.make(), rig.transport, head_start=asked.long_after)
    wall_s, after = trio.current_time() - began, Cpu.now(rig.pid)
    counters_after = await rig.transport.counters()
    counted = counters_after.since(counters) if counters and counters_after else None
    return Result(tracks=tracks, wall_s=wall_s, counted=counted, before=before, after=after)


def show(result: Result) -> None:
    tracks = result.tracks
    short = [track for track in tracks if track.stream.interactive]
    long = [track for track in tracks if not track.stream.interactive]
    windows = reading_windows(tracks)
    gaps = [gap for track in short for gap in track.gaps]
    reading = within(gaps, windows)
    beside = set(reading)
    lines = [
        _line("interactive", short, lengths_ms(gaps)),
        _line("- while a long prompt is read", None, lengths_ms(reading)),
        _line("- otherwise", None, lengths_ms(gap for gap in gaps if gap not in beside)),
    ]
    if long:
        lines.append(_line("long", long, lengths_ms(gap for track in long for gap in track.gaps)))
    header = ("class", "streams", "prompt tok", "TTFT p50 ms", "max", "gaps", "ITL p50 ms", "p95", "p99", "max")
    click.echo(table(header, lines))
    n_tokens = sum(track.n_tokens for track in tracks)
    click.echo()
    click.echo(f"wall          {result.wall_s:.2f} s, {n_tokens / result.wall_s:.1f} tok/s generated ({n_tokens} tokens)")
    if windows:
        read_s = max(end for _, end in windows) - min(start for start, _ in windows)
        n_prompt = sum(answer.prompt_tokens for track in long for answer in track.answers)
        click.echo(f"long prompts  {n_prompt} tokens read in {read_s:.2f} s, {n_prompt / read_s:.1f} tok/s")
    _show_batches(result.counted)
    order = arrivals(tracks)
    click.echo(f"interleaving  {switches(order)} switches between streams, {possible_switches(order)} possible")
    _show_cpu(result)
    for track in tracks:
        told = sum(answer.completion_tokens for answer in track.answers)
        if told != track.n_tokens or not track.finished:
            click.echo(f"WARNING: {track.stream.name} got {track.n_tokens} tokens, the server counts {told}", err=True)


def _line(name: str, tracks: Sequence[Track] | None, itl_ms: list[float]) -> list[str]:
    if tracks is None:
        return [name, "", "", "", "", str(len(itl_ms)), *quantiles(itl_ms)]
    answers = [answer for track in tracks for answer in track.answers]
    ttft = quantiles([answer.ttft_ms for answer in answers if answer.ttft_ms is not None])
    prompt = sum(answer.prompt_tokens for answer in answers)
    return [name, str(len(tracks)), str(prompt), ttft[0], ttft[3], str(len(itl_ms)), *quantiles(itl_ms)]


def _show_batches(counted: Counters | None) -> None:
    if counted is None or not counted.batch_calls:
        click.echo("batches       the server does not tell")
        return
    fed = (counted.tokens + counted.prompt_tokens) / counted.batch_calls
    click.echo(
        f"batches       {counted.batch_calls} llama_decode calls; on average {cell(counted.average_batch, 2)} sequences "
        f"(the server's avg_batch), {cell(counted.tokens_per_call, 2)} tokens generated, {fed:.1f} tokens in and out"
    )


def _show_cpu(result: Result) -> None:
    """Shares of one core.  Others' work is noise in every figure above."""
    before, after, wall_s = result.before, result.after, result.wall_s
    us = after.us - before.us
    server = after.server - before.server if after.server is not None and before.server is not None else None
    others = after.machine - before.machine - us - (server or 0.0)
    told = "-" if server is None else f"{server / wall_s:.0%}"
    click.echo(
        f"cpu           server {told}, this load generator {us / wall_s:.0%}, "
        f"{'others' if server is not None else 'server and others'} {max(0.0, others) / wall_s:.0%} of one core"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--streams", type=click.IntRange(1), default=3, show_default=True, help="Interactive streams.")
@click.option("--tokens", type=click.IntRange(2), default=400, show_default=True, help="Generated by each of them.")
@click.option("--long", type=click.IntRange(0), default=1, show_default=True, help="Long prompts.")
@click.option("--long-words", type=click.IntRange(1), default=1500, show_default=True, help="Words of each.")
@click.option("--long-tokens", type=click.IntRange(1), default=64, show_default=True, help="Generated after each.")
@click.option(
    "--long-after",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="Long prompts arrive when every interactive stream has so many tokens.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts' words.")
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="GGUF to serve; the embedded one if not given.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Compute threads of the daemon that is started.")
@click.option("--socket", type=click.Path(), help="Use the daemon that serves there, and start none.")
@click.option("--protocol", type=click.Choice(["json", "cbor"]), default="json", show_default=True)
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the time of every token.")  # fmt: skip
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(csv_file: Path | None, **options: Any) -> None:
    """Interactive streams beside long prompts, through the daemon's socket.

    Starts a daemon on a temporary socket (SERVE_FLAGS after -- go to `uma-trio serve`), or uses the one at
    --socket. All clients are tasks of this one process; a token's time is taken when its event has been
    decoded. Prompts are random common words, sent raw and greedy with ignore_eos, so every stream yields exactly
    the tokens asked for, whatever the model.

    Prints the machine, then a table. TTFT: from sending a request to its first token. ITL: from token to token of
    one stream, by class; "while a long prompt is read" are the gaps that overlap the time from a long
    prompt's request to its first token. docs/BENCHMARKS.md explains every line.

    The CSV has the columns session_id,token_idx,ts_ms,is_interactive, a row for each token; ts_ms counts from the
    moment when the first long prompt was sent. notebooks/latency.ipynb draws it.

    \b
      python benches/make_model.py --shape 125m --quant q8_0 --out /tmp/125m.gguf
      python benches/mixed_load.py --model /tmp/125m.gguf --threads 2
      python benches/mixed_load.py --streams 8 --long 0 -- --parallel 8
    """
    if options["socket"] is not None and (options["model"] or options["threads"] or options["serve_flags"]):
        raise click.UsageError("--socket uses a daemon as it is: --model, --threads and flags of serve are its own")
    asked = Load(**{field.name: options[field.name] for field in attrs.fields(Load)})
    for line in machine():
        click.echo(line)

    async def work() -> Result:
        async with uma_trio_rig(options) as rig:
            click.echo(f"server    {rig.description}")
            click.echo(f"load      {asked.streams} x {asked.tokens} tokens; {asked.long} x {asked.long_words} words + {asked.long_tokens} tokens, seed {asked.seed}\n")  # fmt: skip
            return await measure(rig, asked)

    try:
        result = run(until_interrupted, work)
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.number)
    except (ClientError, NoDaemon) as error:
        raise click.ClickException(str(error)) from None
    show(result)
    if csv_file is not None:
        write_csv(csv_file, result.tracks)
        click.echo(f"\n{csv_file}: {sum(track.n_tokens for track in result.tracks)} tokens")


if __name__ == "__main__":
    main()
