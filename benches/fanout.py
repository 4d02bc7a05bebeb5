"""Many requests that begin alike and arrive together: how often is their common beginning computed?

python benches/fanout.py --model /tmp/125m.gguf --threads 1
python benches/fanout.py --model /tmp/125m.gguf --threads 1 --stagger 0.5 --repeat 3 --csv fanout.csv
python benches/fanout.py --no-rival --requests 4 --prefix-tokens 500
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import attrs
import click
import contenders
from command import Place, bench, carry_out, csv_option, places, repeat_option, rival_option, show_rival
from comparison import Contender, RunsFile, interleaved, medians
from measure import Result, measure, warm_up
from prompts import of_tokens
from report import cell, table
from rigs import ServerSettings, peers_option, with_prefix_reuse

from uma_trio.demo.recording import Question, Stream
from uma_trio.models.loaded import vocabulary

OURS = (
    "--kv-unified on",
    "--kv-unified off",
    "--kv-unified on --no-prefix-reuse",
    "--kv-unified off --no-prefix-reuse",
)


@attrs.frozen(kw_only=True)
class Fan:
    """What is asked of each server."""

    requests: int
    prefix_tokens: int
    tail_tokens: int
    tokens: int
    stagger: float
    seed: int

    def make(self, model: Path) -> list[Stream]:
        """The same prefix, different tails, exactly ``tokens`` each; not interactive, so that they may be staggered."""
        rng = random.Random(self.seed)
        with vocabulary(model) as tokenizer:
            prefix = of_tokens(tokenizer, rng, self.prefix_tokens)
            texts = [f"{prefix} {of_tokens(tokenizer, rng, self.tail_tokens)}" for _ in range(self.requests)]
        return [
            Stream(
                name=f"r{n}",
                questions=(Question(text=text, raw=True, max_tokens=self.tokens, ignore_eos=True),),
                interactive=False,
            )
            for n, text in enumerate(texts, 1)
        ]

    @property
    def room(self) -> int:
        """Tokens of context for each request."""
        return -(-(self.prefix_tokens + self.tail_tokens + self.tokens + 16) // 256) * 256

    @property
    def ideal(self) -> float:
        """Prompts computed where the beginning is computed once."""
        one = self.prefix_tokens + self.tail_tokens
        return 1 + (self.requests - 1) * self.tail_tokens / one

    def __str__(self) -> str:
        arrival = f"one each {self.stagger:g} s" if self.stagger else "together"
        return (
            f"{self.requests} x ({self.prefix_tokens} tokens in common + {self.tail_tokens} of its own + {self.tokens} "
            f"generated), {arrival}, seed {self.seed}"
        )


@attrs.frozen(kw_only=True)
class Figures:
    """Of one run, or the medians of several."""

    prompt_tokens: float
    """Of one request."""
    computed_tokens: float
    """Of the prompts of all."""
    prompts_computed: float
    """The second over the first: 1 is a single prompt's work, the number of requests is that of all."""
    ttft_first_ms: float
    """The shortest; the last is the longest."""
    ttft_p50_ms: float
    ttft_last_ms: float
    last_over_first: float
    wall_s: float
    others_cpu: float

    @classmethod
    def of(cls, result: Result) -> Figures:
        answers = [answer for track in result.tracks for answer in track.answers]
        prompt = statistics.fmean(answer.prompt_tokens for answer in answers)
        told = sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)
        computed = result.counted.prompt_tokens if result.counted is not None else told
        ttft = [answer.ttft_ms for answer in answers if answer.ttft_ms is not None]
        first, last = min(ttft), max(ttft)
        return cls(
            prompt_tokens=prompt,
            computed_tokens=computed,
            prompts_computed=computed / prompt,
            ttft_first_ms=first,
            ttft_p50_ms=statistics.median(ttft),
            ttft_last_ms=last,
            last_over_first=last / first,
            wall_s=result.wall_s,
            others_cpu=result.cpu.others / result.wall_s,
        )


NAMES = [field.name for field in attrs.fields(Figures)]


def show(figures: dict[Contender, Figures]) -> str:
    header = (
        "", "prompt tok", "computed tok", "prompts computed", "TTFT first ms", "p50", "last", "last / first", "wall s", "others cpu",
    )  # fmt: skip
    lines = [
        [
            str(contender), cell(f.prompt_tokens, 0), cell(f.computed_tokens, 0), cell(f.prompts_computed, 2),
            cell(f.ttft_first_ms), cell(f.ttft_p50_ms), cell(f.ttft_last_ms), cell(f.last_over_first, 2), cell(f.wall_s, 2),
            f"{f.others_cpu:.0%}",
        ]
        for contender, f in figures.items()
    ]  # fmt: skip
    return table(header, lines)


@bench()
@click.option("--requests", type=click.IntRange(2), default=8, help="How many.")
@click.option("--prefix-tokens", type=click.IntRange(1), default=2000, help="That all of them begin with.")
@click.option("--tail-tokens", type=click.IntRange(1), default=32, help="That each has after them, different ones.")
@click.option("--tokens", type=click.IntRange(1), default=16, help="Generated by each.")
@click.option(
    "--stagger", type=click.FloatRange(0), default=0.0, help="Seconds from one arrival to the next; 0: together."
)
@click.option("--seed", type=int, default=0, help="Of the words.")
@places()
@click.option("--ours", multiple=True, default=OURS, show_default=False, help=f"Flags of `uma-trio serve` that make one of our settings; can be given again.  [default: {'; '.join(OURS)}]")  # fmt: skip
@rival_option()
@click.option("--rival-flags", multiple=True, default=["", "-kvu"], show_default=False, help="Flags that make one of llama-server's; can be given again.  [default: none; -kvu]")  # fmt: skip
@peers_option()
@repeat_option(1)
@csv_option("a row for each run")
def main(repeat: int, csv_file: Path | None, **options: Any) -> None:
    """Requests with a common beginning: how much is computed, and who waits how long.

    Each server has room for all of them at once. Ours finds what they share while it is still being computed;
    llama-server finds it in a slot that has computed it (its prompt cache is on, as by default). With --stagger
    larger than the time that a prompt takes, both can.

    \b
    prompts computed   tokens of prompts that were computed, over those of one prompt; the first line says what
                       it is if the beginning is computed once (ours: the server's counter; llama-server: prompt
                       tokens less cache_n of its timings)
    TTFT first, last   the shortest and the longest of the requests, from sending to the first token

    Medians of --repeat runs; each starts its server anew.
    """
    place = Place.of(options)
    fan = Fan(**{field.name: options[field.name] for field in attrs.fields(Fan)})
    place.show()

    async def work() -> dict[Contender, Figures]:
        streams = fan.make(place.model)
        serving = ServerSettings(
            model=place.model, threads=place.threads, parallel=fan.requests, ctx=fan.requests * fan.room
        )
        if options["rival"]:
            show_rival(options["peers"])
        click.echo(f"servers   {serving}\nload      {fan}\nideal     {fan.ideal:.2f} prompts computed\n")
        ours = contenders.ours(serving, options["ours"])
        rivals = contenders.rivals(options["peers"], serving, options["rival_flags"] if options["rival"] else ())
        runs: dict[Contender, list[Figures]] = {contender: [] for contender in [*ours, *rivals]}
        file = RunsFile(csv_file, ["run", "server", "setting", *NAMES])
        for contender in interleaved(ours, rivals, repeat):
            async with contender.rig() as rig:
                await warm_up(rig)
                result = await measure(with_prefix_reuse(rig), streams, every_s=fan.stagger, pins=place.pins)
            for line in result.unfinished():
                click.echo(f"WARNING: {line}", err=True)
            figures = Figures.of(result)
            runs[contender].append(figures)
            file.add(len(runs[contender]), contender.server, contender.setting, *attrs.astuple(figures))
            click.echo(
                f"run {len(runs[contender])}  {contender!s:<48} {figures.prompts_computed:5.2f} prompts computed, "
                f"wall {figures.wall_s:.2f} s"
            )
        return {contender: medians(found) for contender, found in runs.items()}

    click.echo(f"\n{show(carry_out(work))}")


if __name__ == "__main__":
    main()
