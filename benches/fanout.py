"""Measure prefix sharing: how often is a common prefix computed when several requests arrive together?

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
from uma_trio.tokenizer.vocabulary import vocabulary

OURS = (
    "--kv-unified on",
    "--kv-unified off",
    "--kv-unified on --no-prefix-reuse",
    "--kv-unified off --no-prefix-reuse",
)


@attrs.frozen(kw_only=True)
class Fan:
    """The requests."""

    requests: int
    prefix_tokens: int
    tail_tokens: int
    tokens: int
    stagger: float
    seed: int

    def make(self, model: Path) -> list[Stream]:
        """Requests with the same prefix, different tails and exactly ``tokens`` generated tokens.

        They are not interactive, since only such streams can be staggered.
        """
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
        """Tokens of context of each request."""
        return -(-(self.prefix_tokens + self.tail_tokens + self.tokens + 16) // 256) * 256

    @property
    def ideal(self) -> float:
        """Prompts computed if the prefix is computed once."""
        one = self.prefix_tokens + self.tail_tokens
        return 1 + (self.requests - 1) * self.tail_tokens / one

    def __str__(self) -> str:
        arrival = f"one every {self.stagger:g} s" if self.stagger else "together"
        return (
            f"{self.requests} x ({self.prefix_tokens} common tokens + {self.tail_tokens} own tokens + {self.tokens} "
            f"generated), {arrival}, seed {self.seed}"
        )


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several."""

    prompt_tokens: float
    """Tokens of one prompt."""
    computed_tokens: float
    """Computed tokens of all prompts."""
    prompts_computed: float
    """``computed_tokens / prompt_tokens``: between 1 and the number of requests."""
    ttft_first_ms: float
    """The shortest TTFT; ``ttft_last_ms`` is the longest."""
    ttft_p50_ms: float
    ttft_last_ms: float
    last_over_first: float
    wall_s: float
    others_cpu: float

    @classmethod
    def of(cls, result: Result) -> Figures:
        answers = [answer for track in result.tracks for answer in track.answers]
        prompt = statistics.fmean(answer.prompt_tokens for answer in answers)
        by_answer = sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)
        computed = result.counted.prompt_tokens if result.counted is not None else by_answer
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
@click.option("--requests", type=click.IntRange(2), default=8, help="Number of requests.")
@click.option("--prefix-tokens", type=click.IntRange(1), default=2000, help="Tokens of the common prefix.")
@click.option(
    "--tail-tokens", type=click.IntRange(1), default=32, help="Further prompt tokens of each request, all different."
)
@click.option("--tokens", type=click.IntRange(1), default=16, help="Tokens that each request generates.")
@click.option("--stagger", type=click.FloatRange(0), default=0.0, help="Seconds between two arrivals; 0: all together.")
@click.option("--seed", type=int, default=0, help="Seed of the words.")
@places()
@click.option("--ours", multiple=True, default=OURS, show_default=False, help=f"Flags of `uma-trio serve` for one setting; repeatable.  [default: {'; '.join(OURS)}]")  # fmt: skip
@rival_option()
@click.option("--rival-flags", multiple=True, default=["", "-kvu"], show_default=False, help="Flags of llama-server for one setting; repeatable.  [default: none; -kvu]")  # fmt: skip
@peers_option()
@repeat_option(1)
@csv_option("a row for each run")
def main(repeat: int, csv_file: Path | None, **options: Any) -> None:
    """Measure how often a common prefix of several requests is computed.

    Each server has room for all requests. uma-trio shares a prefix while it is still being computed; llama-server
    reuses one that a slot has computed (its prompt cache is on, as by default). With a --stagger longer than the
    prefill, both can share.

    \b
    prompts computed   computed prompt tokens, divided by the tokens of one prompt; the line `ideal` has the value if
                       the prefix is computed once (uma-trio: the server's counter; llama-server: prompt tokens
                       without the cache_n of its timings)
    TTFT first, last   the shortest and the longest time to first token

    The table has the medians of --repeat runs. Each run starts its server.
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
        return {contender: medians(of_contender) for contender, of_contender in runs.items()}

    click.echo(f"\n{show(carry_out(work))}")


if __name__ == "__main__":
    main()
