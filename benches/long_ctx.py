"""Measure the decode speed of one stream against the length of its context.

python benches/long_ctx.py --model /tmp/125m.gguf --threads 1 --csv ctx.csv
python benches/long_ctx.py --kv-unified off,on --flash-attn off,on --csv-all all.csv
python benches/long_ctx.py --no-rival --contexts 512,8192 --tokens 64 --repeat 5
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import contenders
from command import (
    FILE,
    Place,
    bench,
    carry_out,
    choices,
    csv_option,
    numbers,
    places,
    plot_option,
    repeat_option,
    rival_option,
    show_rival,
)
from comparison import Contender, RunsFile, interleaved
from measure import WORDS, decode_rate, measure, warm_up
from prompts import cut
from report import cell, table
from rigs import Rig, ServerSettings, peers_option, with_prefix_reuse, without_speculation

from uma_trio.demo.recording import Answer, Question, Stream
from uma_trio.tokenizer.vocabulary import vocabulary

Speeds = dict[int, list[float]]
"""Context in tokens -> tokens per second of each run."""


@attrs.frozen(kw_only=True)
class Ladder:
    """Prompts of increasing length, each of which begins with the one before."""

    contexts: Sequence[int]
    """Tokens of prompt and answer together, for each prompt."""
    tokens: int
    seed: int

    def questions(self, model: Path) -> dict[int, Question]:
        """A request for each context."""
        words = random.Random(self.seed).choices(WORDS, k=max(self.contexts))
        with vocabulary(model) as tokenizer:
            texts = {ctx: cut(tokenizer, words, ctx - self.tokens) for ctx in sorted(self.contexts)}
        return {
            ctx: Question(text=text, raw=True, max_tokens=self.tokens, ignore_eos=True) for ctx, text in texts.items()
        }


async def climb(rig: Rig, questions: dict[int, Question], place: Place) -> dict[int, Answer]:
    """Run one stream at each context.  The prefill of the new part of its prompt does not count."""
    answers = {}
    for ctx, question in questions.items():
        result = await measure(rig, [Stream(name=f"{ctx}", questions=(question,))], pins=place.pins)
        for line in result.unfinished():
            click.echo(f"WARNING: {line}", err=True)
        (answers[ctx],) = result.tracks[0].answers
    return answers


def show(speeds: dict[Contender, Speeds], contexts: Sequence[int]) -> str:
    """Medians, with a column for each context."""
    header = ["decode tok/s at a context of", *(f"{ctx:,}" for ctx in contexts), "last / first"]
    lines = []
    for contender, runs_by_ctx in speeds.items():
        medians = [statistics.median(runs_by_ctx[ctx]) for ctx in contexts]
        lines.append([str(contender), *(cell(tps) for tps in medians), cell(medians[-1] / medians[0], 2)])
    return table(header, lines)


def plot(speeds: dict[Contender, Speeds], path: Path, title: str) -> None:
    """Plot the medians against the context."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for contender, runs_by_ctx in speeds.items():
        style = "o-" if contender.ours else "s--"
        axes.plot(
            list(runs_by_ctx), [statistics.median(runs) for runs in runs_by_ctx.values()], style, label=str(contender)
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xticks(list(runs_by_ctx))
    axes.set(xlabel="context, tokens (log)", ylabel="tokens per second of one stream", ylim=(0, None))
    axes.set_title(title, fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@bench()
@click.option(
    "--contexts", default="512,1024,2048,4096,8192", help="Tokens of prompt and answer together, separated by commas."
)
@click.option("--tokens", type=click.IntRange(3), default=64, help="Tokens generated at each context.")
@click.option("--seed", type=int, default=0, help="Seed of the words.")
@places()
@click.option(
    "--kv-unified",
    "layouts",
    default="auto",
    help="Values of --kv-unified for uma-trio, separated by commas: auto, on, off.",
)
@click.option("--flash-attn", "flash", default="auto", help="Values of --flash-attn for uma-trio, likewise.")
@rival_option()
@click.option("--rival-flags", multiple=True, default=["", "-fa off"], show_default=False, help="Flags of llama-server for one setting; repeatable.  [default: none; -fa off]")  # fmt: skip
@peers_option()
@repeat_option(3)
@csv_option("ctx,tps: the medians of the first setting of uma-trio")
@click.option("--csv-all", type=FILE, help="Write a row for each run of each setting and server.")
@plot_option("tokens per second against the context")
def main(
    layouts: str,
    flash: str,
    repeat: int,
    csv_file: Path | None,
    csv_all: Path | None,
    plot_file: Path | None,
    **options: Any,
) -> None:
    """Measure the decode speed of one stream against its context.

    Each prompt begins with the one before, so that a server computes the new part only (both servers reuse
    prefixes). Then exactly --tokens are generated, and their rate from the first to the last one is measured. The
    context is the length of prompt and answer together. uma-trio runs without speculation. Each run starts its server;
    the table has the medians of --repeat runs.
    """
    place = Place.of(options)
    contexts = sorted(numbers(options["contexts"], "--contexts"))
    if contexts[0] <= options["tokens"]:
        raise click.BadParameter("each context must be larger than --tokens", param_hint="--contexts")
    three = ("auto", "on", "off")
    settings = [
        f"--kv-unified {layout} --flash-attn {attention}"
        for layout, attention in itertools.product(
            choices(layouts, "--kv-unified", three), choices(flash, "--flash-attn", three)
        )
    ]
    ladder = Ladder(contexts=contexts, tokens=options["tokens"], seed=options["seed"])
    place.show()

    async def work() -> dict[Contender, Speeds]:
        questions = ladder.questions(place.model)
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=1, ctx=max(contexts))
        if options["rival"]:
            show_rival(options["peers"])
        click.echo(
            f"servers   {serving}\nload      1 stream, {ladder.tokens} tokens at each context, seed {ladder.seed}\n"
        )
        ours = contenders.ours(serving, settings)
        rivals = contenders.rivals(options["peers"], serving, options["rival_flags"] if options["rival"] else ())
        speeds: dict[Contender, Speeds] = {contender: {ctx: [] for ctx in contexts} for contender in [*ours, *rivals]}
        file = RunsFile(csv_all, ["run", "server", "setting", "ctx", "prompt_tokens", "tps"])
        for contender in interleaved(ours, rivals, repeat):
            async with contender.rig() as rig:
                await warm_up(rig)
                asked = with_prefix_reuse(without_speculation(rig) if contender.ours else rig)
                answers = await climb(asked, questions, place)
            for ctx, answer in answers.items():
                speeds[contender][ctx].append(decode_rate([answer]))
                file.add(
                    len(speeds[contender][ctx]),
                    contender.server,
                    contender.setting,
                    ctx,
                    answer.prompt_tokens,
                    decode_rate([answer]),
                )
            shown = ", ".join(f"{ctx}: {runs[-1]:.1f}" for ctx, runs in speeds[contender].items())
            click.echo(f"run {len(speeds[contender][contexts[0]])}  {contender!s:<48} {shown} tok/s")
        return speeds

    speeds = carry_out(work)
    click.echo(f"\n{show(speeds, contexts)}")
    if plot_file is not None:
        plot(speeds, plot_file, f"{place.model.name}, {place.threads} compute threads")
    file = RunsFile(csv_file, ["ctx", "tps"])
    for ctx, runs in next(iter(speeds.values())).items():
        file.add(ctx, statistics.median(runs))


if __name__ == "__main__":
    main()
