"""Measure how long a tenant waits for a first token while another one takes all that it can get.

python benches/crowding.py --threads 1
python benches/crowding.py --model /tmp/125m.gguf --threads 1 --attack long --attack many
python benches/crowding.py --threads 1 --attack "long prompt" --parallel 1
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, places
from comparison import RunsFile
from measure import warm_up
from report import cell, table
from rigs import ServerSettings, uma_trio_flags, uma_trio_rig, without_speculation

from uma_trio.client import ServerError, Token, open_client

N_HONEST: Final = 3
VISIT_TOKENS: Final = 3
LONG_TOKENS: Final = 7000
PLAIN: Final[dict[str, Any]] = {"ignore_eos": True, "cache_prompt": False, "speculate": False, "keep_alive": True}

LIGHT: Final = "start(async () => { for (;;) { await gen({ maxTokens: 4 }); await $`.` } })"
"""A controller that asks for a few tokens at a time."""
BUSY: Final = "start(async () => { for (;;) { for (let i = 0; i < 20000; i++); await gen({ maxTokens: 1 }) } })"

Attack = Callable[[str], Awaitable[None]]
"""Opens one connection, and holds on to it until cancelled."""


async def stream(path: str, **fields: Any) -> None:
    """Send one long request after another."""
    while True:
        try:
            async with open_client(path) as client:
                async for _ in client.generate(**{"max_tokens": LONG_TOKENS, "principal": "greedy", **fields}):
                    pass
        except ServerError:
            await trio.sleep(0.05)


async def unread(path: str) -> None:
    """Send a long request and read nothing of its answer."""
    async with open_client(path) as client:
        async for _ in client.generate(prompt="a", max_tokens=LONG_TOKENS, principal="greedy", **PLAIN):
            await trio.sleep_forever()


ATTACKS: Final[dict[str, tuple[int, Attack]]] = {
    "long": (8, partial(stream, prompt="a", **PLAIN)),
    "many": (100, partial(stream, prompt="a", **PLAIN)),
    "interactive": (100, partial(stream, prompt="a", slo={"priority": "interactive"}, **PLAIN)),
    "prompts": (100, partial(stream, prompt="hello " * 1500, **{**PLAIN, "max_tokens": 1})),
    "long prompt": (1, partial(stream, prompt="hello " * 3000, **{**PLAIN, "max_tokens": 1500})),
    "unread": (8, unread),
    "controllers": (8, partial(stream, controller="jsctrl", controller_arg=LIGHT)),
    "busy controllers": (60, partial(stream, controller="jsctrl", controller_arg=BUSY)),
}


@attrs.define
class Honest:
    """Streams of a second tenant, and short requests of a third one."""

    path: str
    gaps_s: list[float] = attrs.field(factory=list)
    waits_s: list[float] = attrs.field(factory=list)

    async def stream(self) -> None:
        """Generate for ever, and note the times between tokens."""
        while True:
            at: list[float] = []
            async with open_client(self.path) as client:
                async for event in client.generate(prompt="b", max_tokens=1000, principal="honest", **PLAIN):
                    if isinstance(event, Token):
                        at.append(trio.current_time())
                        self.gaps_s += [b - a for a, b in itertools.pairwise(at[-2:])]

    async def visit(self, seconds: float) -> None:
        """Send short requests, one after another, and note when their first tokens come."""
        ends = trio.current_time() + seconds
        while trio.current_time() < ends:
            began = trio.current_time()
            with trio.move_on_after(seconds) as limit:
                async with open_client(self.path) as client:
                    first_at = None
                    async for event in client.generate(
                        prompt="c", max_tokens=VISIT_TOKENS, principal="visitor", **PLAIN
                    ):
                        if isinstance(event, Token) and first_at is None:
                            first_at = trio.current_time()
            self.waits_s.append(seconds if limit.cancelled_caught or first_at is None else first_at - began)
            await trio.sleep(0.5)


@bench()
@click.option(
    "--attack",
    "attacks",
    multiple=True,
    type=click.Choice([*ATTACKS]),
    help="What the greedy tenant does; may be repeated.  [default: all]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=10.0,
    help="Duration of each attack, and the longest wait that it can measure.",
)
@click.option("--parallel", type=click.IntRange(1), default=8, help="Sequences, with 8,192 tokens each.")
@places()
@csv_option("a row for each attack")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(attacks: tuple[str, ...], seconds: float, parallel: int, csv_file: Path | None, **options: Any) -> None:
    """Measure first tokens of a visitor, and gaps of three honest streams, next to a greedy tenant.

    The visitor asks for three tokens at a time.  All tenants have the same weight.  SERVE_FLAGS after -- go to `uma-trio
    serve`.
    """
    place = Place.of(options)
    serving = ServerSettings(model=place.model, threads=place.threads, parallel=parallel, ctx=parallel * 8192)
    place.show()
    click.echo(f"server    {serving}\n")
    names = ["attack", "connections", "first token, worst, s", "median", "visits", "largest gap, s", "preemptions"]
    file = RunsFile(csv_file, names)

    async def one(name: str, n: int, attack: Attack | None) -> list[str]:
        async with uma_trio_rig([*uma_trio_flags(serving), *options["serve_flags"]]) as rig:
            await warm_up(without_speculation(rig))
            honest = Honest(str(rig.transport.path))
            async with trio.open_nursery() as nursery:
                if attack is not None:
                    for _ in range(n):
                        nursery.start_soon(attack, honest.path)
                    await trio.sleep(2)
                for _ in range(N_HONEST):
                    nursery.start_soon(honest.stream)
                await trio.sleep(1)
                await honest.visit(seconds)
                snapshot = await rig.transport.snapshot()
                nursery.cancel_scope.cancel()
        waits = sorted(honest.waits_s)
        row = [
            name, n, waits[-1], waits[len(waits) // 2], len(waits), max(honest.gaps_s, default=seconds),
            snapshot["preemptions_total"],
        ]  # fmt: skip
        file.add(*row)
        return [str(value) if isinstance(value, str | int) else cell(value, 3) for value in row]

    async def work() -> None:
        rows = [await one("none", 0, None)]
        for name in attacks or [*ATTACKS]:
            rows.append(await one(name, *ATTACKS[name]))
        click.echo(table(names, rows))

    carry_out(work)


if __name__ == "__main__":
    main()
