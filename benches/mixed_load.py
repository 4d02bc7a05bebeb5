"""Measure short interactive streams next to long prompts: do they freeze, and what does it cost?

python benches/mixed_load.py
python benches/mixed_load.py --model /tmp/125m.gguf --threads 1 --tokens 400 --long 5 --long-words 1500
python benches/mixed_load.py --csv tokens.csv -- --no-kv-unified --parallel 8
python benches/mixed_load.py --model /tmp/125m.gguf --threads 1 --long 5 --rival llama-server --plot pareto.png
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click
from command import PIN_HELP, carry_out, plot_option
from comparison import NAMES, US, Comparison, Contender, Figures, RunsFile, interleaved, medians
from machine import machine
from measure import Result, measure, stream, warm_up
from pinning import Pins, parse_pins
from report import cell, quantiles, table, write_csv
from rigs import (
    ServerSettings,
    llama_server_rig,
    peer,
    peers_option,
    room,
    running_rig,
    same_library,
    uma_trio_flags,
    uma_trio_rig,
)

from uma_trio.demo.recording import (
    Stream,
    Track,
    arrivals,
    durations_ms,
    overlapping,
    possible_switches,
    prefill_windows,
    switches,
)
from uma_trio.demo.scorecard import Counters
from uma_trio.models.packaged import EMBEDDED
from uma_trio.processes.machine import default_threads

RIVAL = "llama-server"
RIVAL_BATCHES = "2048,512,128,64"
"""Values of -b, the default first."""
OUR_TARGETS_MS = (40, 60, 100, 150, 250, 500)

SHORT_WORDS = 20
"""Words of an interactive stream's prompt."""


@attrs.frozen(kw_only=True)
class Load:
    """The streams."""

    streams: int
    tokens: int
    long: int
    long_words: int
    long_tokens: int
    long_after: int
    long_every: float
    seed: int

    def make(self) -> list[Stream]:
        """Streams with prompts of common words, all different."""
        rng = random.Random(self.seed)
        return [
            *(stream(rng, f"s{n}", SHORT_WORDS, self.tokens) for n in range(1, self.streams + 1)),
            *(
                stream(rng, f"long{n}", self.long_words, self.long_tokens, interactive=False)
                for n in range(1, self.long + 1)
            ),
        ]

    @property
    def parallel(self) -> int:
        return self.streams + self.long

    @property
    def room(self) -> int:
        """Tokens of context that each sequence needs."""
        return max(room(SHORT_WORDS, self.tokens), room(self.long_words, self.long_tokens) if self.long else 0)

    def __str__(self) -> str:
        every = f", one every {self.long_every:g} s" if self.long_every else ""
        return (
            f"{self.streams} x {self.tokens} tokens; {self.long} x {self.long_words} words + {self.long_tokens} tokens "
            f"after {self.long_after}{every}, seed {self.seed}"
        )


def show(result: Result) -> None:
    """Print the figures of one run."""
    tracks = result.tracks
    short = [track for track in tracks if track.stream.interactive]
    long = [track for track in tracks if not track.stream.interactive]
    windows = prefill_windows(tracks)
    gaps = [gap for track in short for gap in track.gaps]
    during = overlapping(gaps, windows)
    overlaps = set(during)
    lines = [
        _line("interactive", short, durations_ms(gaps)),
        _line("- during prefill of a long prompt", None, durations_ms(during)),
        _line("- otherwise", None, durations_ms(gap for gap in gaps if gap not in overlaps)),
    ]
    if long:
        lines.append(_line("long", long, durations_ms(gap for track in long for gap in track.gaps)))
    header = ("class", "streams", "prompt tok", "TTFT p50 ms", "max", "gaps", "ITL p50 ms", "p95", "p99", "max")
    click.echo(table(header, lines))
    click.echo()
    click.echo(
        f"wall          {result.wall_s:.2f} s, {result.tokens_per_s:.1f} tok/s generated ({result.n_tokens} tokens)"
    )
    if windows:
        prefill_s = max(end for _, end in windows) - min(start for start, _ in windows)
        n_prompt = sum(answer.prompt_tokens for track in long for answer in track.answers)
        click.echo(f"long prompts  {n_prompt} tokens in {prefill_s:.2f} s, {n_prompt / prefill_s:.1f} tok/s")
    _show_batches(result.counted)
    order = arrivals(tracks)
    click.echo(f"interleaving  {switches(order)} switches between streams, {possible_switches(order)} possible")
    _show_cpu(result)
    warn(result)


def warn(result: Result) -> None:
    """Print a warning for each incomplete answer."""
    for line in result.unfinished():
        click.echo(f"WARNING: {line}", err=True)


def _line(name: str, tracks: Sequence[Track] | None, itl_ms: list[float]) -> list[str]:
    if tracks is None:
        return [name, "", "", "", "", str(len(itl_ms)), *quantiles(itl_ms)]
    answers = [answer for track in tracks for answer in track.answers]
    ttft = quantiles([answer.ttft_ms for answer in answers if answer.ttft_ms is not None])
    prompt = sum(answer.prompt_tokens for answer in answers)
    return [name, str(len(tracks)), str(prompt), ttft[0], ttft[3], str(len(itl_ms)), *quantiles(itl_ms)]


def _show_batches(counted: Counters | None) -> None:
    if counted is None or not counted.ticks:
        click.echo("batches       not reported by the server")
        return
    per_tick = (counted.tokens + counted.prompt_tokens) / counted.ticks
    click.echo(
        f"batches       {counted.ticks} ticks; on average {cell(counted.average_batch, 2)} sequences "
        f"(avg_batch), {cell(counted.tokens_per_tick, 2)} generated tokens, {per_tick:.1f} tokens with prefill"
    )


def _show_cpu(result: Result) -> None:
    """Print processor time as shares of one core.  That of other processes is noise in all figures."""
    cpu, wall_s = result.cpu, result.wall_s
    server = "-" if cpu.server is None else f"{cpu.server / wall_s:.0%}"
    others = "server and others" if cpu.server is None else "others"
    click.echo(
        f"cpu           server {server}, load generator {cpu.generator / wall_s:.1%} "
        f"({1e6 * cpu.generator / result.n_tokens:.0f} us a token), {others} {cpu.others / wall_s:.0%} of one core"
    )


async def one(options: dict[str, Any], asked: Load, pins: Pins | None) -> Result:
    """Run the load once, on the daemon at --socket or on a new one."""
    if options["socket"] is not None:
        rig = running_rig(options["socket"], protocol=options["protocol"])
    else:
        rig = uma_trio_rig(serve_flags(options), protocol=options["protocol"])
    async with rig as started:
        threads = "" if options["socket"] or options["threads"] else f"; threads {default_threads()} by default"
        click.echo(f"server    {started.description}{threads}\nload      {asked}\n")
        return await measure(started, asked.make(), head_start=asked.long_after, every_s=asked.long_every, pins=pins)


def serve_flags(options: dict[str, Any]) -> list[str]:
    """Flags of the new daemon."""
    flags = []
    if options["model"] is not None:
        flags += ["--model", str(options["model"])]
    if options["threads"] is not None:
        flags += ["--threads", str(options["threads"])]
    return [*flags, *options["serve_flags"]]


def contenders(options: dict[str, Any], serving: ServerSettings) -> tuple[list[Contender], list[Contender]]:
    """Contenders of ours and of the rival, whose default comes first.

    Raises:
        RivalError: there is no llama-server.
    """
    peer(options["peers"], RIVAL)
    ours = options["ours"] or [f"--target-itl-ms {ms}" for ms in OUR_TARGETS_MS]
    theirs = [
        f"-b {batch} {flags}".strip() for flags in options["rival_flags"] for batch in options["rival_batch"].split(",")
    ]
    return [
        Contender(
            server=US,
            setting=setting,
            rig=partial(
                uma_trio_rig,
                [*uma_trio_flags(serving), *options["serve_flags"], *shlex.split(setting)],
                protocol=options["protocol"],
            ),
        )
        for setting in ours
    ], [
        Contender(
            server=RIVAL,
            setting=setting,
            rig=partial(llama_server_rig, options["peers"], serving, shlex.split(setting)),
        )
        for setting in theirs
    ]


async def compare(options: dict[str, Any], asked: Load, pins: Pins | None) -> Comparison:
    """Run the load on all contenders, alternating.  Each run starts its server."""
    serving = ServerSettings(
        model=options["model"] or EMBEDDED,
        threads=options["threads"] or default_threads(),
        parallel=options["parallel"] or asked.parallel,
        ctx=options["ctx"] or (options["parallel"] or asked.parallel) * asked.room,
    )
    ours, rivals = contenders(options, serving)
    alike = (
        "with the library files of uma-trio"
        if same_library(options["peers"])
        else "with ANOTHER BUILD of the library than uma-trio"
    )
    click.echo(f"servers   {serving}\nrival     {RIVAL} in {options['peers']}, {alike}\nload      {asked}\n")
    runs: dict[Contender, list[Figures]] = {contender: [] for contender in [*rivals, *ours]}
    file = RunsFile(options["csv_file"], ["run", "server", "setting", *NAMES])
    for contender in interleaved(ours, rivals, options["repeat"]):
        async with contender.rig() as rig:
            await warm_up(rig)
            result = await measure(rig, asked.make(), head_start=asked.long_after, every_s=asked.long_every, pins=pins)
        warn(result)
        figures = Figures.of(result)
        runs[contender].append(figures)
        file.add(len(runs[contender]), contender.server, contender.setting, *attrs.astuple(figures))
        click.echo(
            f"run {len(runs[contender])}  {contender!s:<32} wall {cell(figures.wall_s, 2)} s, "
            f"ITL p99 {cell(figures.itl_p99_ms)} ms, others cpu {figures.others_cpu:.0%}"
        )
    return Comparison({contender: medians(of_contender) for contender, of_contender in runs.items()})


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--streams", type=click.IntRange(1), default=3, help="Interactive streams.")
@click.option("--tokens", type=click.IntRange(2), default=400, help="Tokens that each of them generates.")
@click.option("--long", type=click.IntRange(0), default=1, help="Long prompts.")
@click.option("--long-words", type=click.IntRange(1), default=1500, help="Words of each long prompt.")
@click.option("--long-tokens", type=click.IntRange(1), default=64, help="Tokens generated for each long prompt.")
@click.option("--long-after", type=click.IntRange(0), default=50, help="Tokens that each interactive stream has when the long prompts arrive.")  # fmt: skip
@click.option("--long-every", type=click.FloatRange(0), default=0.0, help="Seconds between two long prompts; 0: all together.")  # fmt: skip
@click.option("--seed", type=int, default=0, help="Seed of the words.")
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="GGUF file to serve.  [default: the embedded model]")  # fmt: skip
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Compute threads of the servers.  [default: all physical cores but one]",
)
@click.option("--pin", "pin_text", default="auto", help=PIN_HELP)  # fmt: skip
@click.option("--socket", type=click.Path(), help="Socket of a running daemon.  [default: start one]")
@click.option(
    "--protocol",
    type=click.Choice(["json", "cbor", "http"]),
    default="json",
    help="How uma-trio is asked: over its socket, in one of two encodings, or over HTTP.",
)
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the time of each token; with --rival, a row for each run.")  # fmt: skip
@click.option("--rival", type=click.Choice([RIVAL]), help="Compare several settings of uma-trio and of this server.")
@click.option("--rival-batch", default=RIVAL_BATCHES, help="Values of its -b; ratios are relative to the first one.")
@click.option("--rival-flags", multiple=True, default=[""], help="Further flags of llama-server; repeatable, for all values of -b each.")  # fmt: skip
@peers_option()
@click.option("--ours", multiple=True, help="Flags of `uma-trio serve` for one setting; repeatable.  [default: --target-itl-ms 40, 60, 100, 150, 250, 500]")  # fmt: skip
@click.option("--repeat", type=click.IntRange(1), default=1, help="Runs of each setting, alternating.")
@click.option("--parallel", type=click.IntRange(1), help="With --rival: sequences of each server.  [default: one for each stream and long prompt]")  # fmt: skip
@click.option("--ctx", type=click.IntRange(1), help="With --rival: tokens of context of each server.  [default: what the load needs]")  # fmt: skip
@plot_option("wall time against p99")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(**options: Any) -> None:
    """Measure interactive streams next to long prompts.

    Starts a daemon on a temporary socket (SERVE_FLAGS after -- go to `uma-trio serve`), or uses the one at
    --socket. All clients are tasks of this process; the time of a token is that of its decoded event. Prompts are
    random common words, sent raw, greedy and with ignore_eos, so every stream generates exactly the requested
    number of tokens with any model.

    Prints the machine, then a table. TTFT is the time from a request to its first token. ITL is the time between two
    tokens of a stream; "during prefill of a long prompt" has the gaps that overlap the time from the request with a
    long prompt to its first token. docs/BENCHMARKS.md explains the other lines.

    The CSV has the columns session_id,token_idx,ts_ms,is_interactive and a row for each token; ts_ms counts from the
    request with the first long prompt. notebooks/latency.ipynb plots it.

    With --rival, both servers get the same model, threads, sequences, context and prompts. Each run starts its
    server. The tables have the medians of --repeat runs.

    \b
      python benches/make_model.py --shape 125m --quant q8_0 --out /tmp/125m.gguf
      python benches/mixed_load.py --model /tmp/125m.gguf --threads 1
      python benches/mixed_load.py --streams 8 --long 0 -- --parallel 8
      python benches/mixed_load.py --model /tmp/125m.gguf --threads 1 --long 5 --rival llama-server --repeat 3
    """
    check(options)
    asked = Load(**{field.name: options[field.name] for field in attrs.fields(Load)})
    try:
        pins = parse_pins(options["pin_text"], options["threads"] or default_threads())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--pin") from None
    for line in [*machine(), f"pin       {pins or 'none'}"]:
        click.echo(line)
    work = compare if options["rival"] else one
    outcome = carry_out(partial(work, options, asked, pins))
    if isinstance(outcome, Comparison):
        click.echo(f"\n{outcome.show()}")
        if options["plot_file"] is not None:
            outcome.plot(options["plot_file"], f"{(options['model'] or EMBEDDED).name}: {asked}")
        return
    show(outcome)
    if options["csv_file"] is not None:
        write_csv(options["csv_file"], outcome.tracks)
        click.echo(f"\n{options['csv_file']}: {sum(track.n_tokens for track in outcome.tracks)} tokens")


def check(options: dict[str, Any]) -> None:
    """Check that the options fit each other."""
    if options["socket"] is not None and (options["model"] or options["threads"] or options["serve_flags"]):
        raise click.UsageError("--socket uses a running daemon: --model, --threads and flags of serve cannot be set")
    if options["socket"] is not None and options["rival"]:
        raise click.UsageError("--rival starts both servers, so --socket cannot be used")
    if options["socket"] is not None and options["protocol"] == "http":
        raise click.UsageError("--protocol http starts a daemon with a gateway: --socket cannot be used")
    if options["ours"] and not options["rival"]:
        raise click.UsageError("--ours needs --rival; flags of a single daemon come after --")
    if not all(batch.isdecimal() and int(batch) for batch in options["rival_batch"].split(",")):
        raise click.BadParameter("expected numbers above 0, separated by commas", param_hint="--rival-batch")


if __name__ == "__main__":
    main()
