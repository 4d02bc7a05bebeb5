"""Change running answers under load: how soon are changes made, and do the texts of others stay the same?

python benches/steering.py
python benches/steering.py --rounds 20 --streams 16
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, places
from comparison import RunsFile
from pinning import pinned
from report import quantiles, table
from rigs import ServerSettings, uma_trio_flags

from uma_trio.client import Token, open_client
from uma_trio.demo.temporary_daemon import temporary_daemon

CHANGES: Final[Sequence[dict[str, Any]]] = (
    {"text": " And then"},
    {"message": "Shorter, please."},
    {"max_tokens": 60},
    {"stop": "sentence"},
)
EXACT: Final = ("--kv-unified", "off", "--flash-attn", "on")
"""A layout in which a text does not depend on other streams."""
TOKENS: Final = 120


@attrs.frozen(kw_only=True)
class Change:
    """One change."""

    kind: str
    delay_tokens: int
    """Tokens that the answer got between the query and the change, as its client counts them."""
    ms: float
    """Until the client knew that it was made."""


@attrs.define
class Stream:
    """One answer."""

    number: int
    ids: list[int] = attrs.field(factory=list)
    change: Change | None = None

    def request(self) -> dict[str, Any]:
        question = f"Tell me a story about a fox and {self.number + 2} friends."
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "seed": self.number}
        return {**fields, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.7}

    async def run(self, path: Path, name: str) -> None:
        """Read the answer to its end."""
        async with open_client(path) as client:
            async for event in client.generate(id=name, **self.request()):
                if isinstance(event, Token) and event.token_id is not None:
                    self.ids.append(event.token_id)

    async def steer(self, path: Path, name: str, after: int, change: dict[str, Any]) -> None:
        """Change the answer when it has ``after`` tokens."""
        async with open_client(path) as client:
            while len(self.ids) < after:  # noqa: ASYNC110 - a second client counts
                await trio.sleep(0.001)
            n_before, began = len(self.ids), trio.current_time()
            done = await client.steer(name, **change)
        ms = 1e3 * (trio.current_time() - began)
        self.change = Change(kind=next(iter(change)), delay_tokens=done.after_tokens - n_before, ms=ms)


async def one_round(path: Path, n_streams: int, rng: random.Random, *, n_changed: int) -> list[Stream]:
    """Run all streams together, and change some of them."""
    streams = [Stream(n) for n in range(n_streams)]
    name = f"r{rng.getrandbits(48)}"
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(stream.run, path, f"{name}-{stream.number}")
        for n, stream in enumerate(rng.sample(streams, n_changed)):
            change = CHANGES[n % len(CHANGES)]
            nursery.start_soon(stream.steer, path, f"{name}-{stream.number}", rng.randint(5, 50), change)
    return streams


def show(changed: Sequence[Change], n_compared: int, n_other: int) -> str:
    """A row for each kind of change, and what became of the other streams."""
    groups = {"all": changed, **{kind: [c for c in changed if c.kind == kind] for kind in {c.kind for c in changed}}}
    rows = [
        [
            kind,
            str(len(group)),
            *quantiles([float(change.delay_tokens) for change in group]),
            *quantiles([change.ms for change in group]),
        ]
        for kind, group in sorted(groups.items())
    ]
    header = ("change", "n", "tokens later p50", "p95", "p99", "max", "ms p50", "p95", "p99", "max")
    return f"{table(header, rows)}\n\nother streams  {n_compared} texts compared, {n_other} differ"


@bench()
@click.option("--rounds", type=click.IntRange(1), default=10, help="How often all streams run.")
@click.option("--streams", type=click.IntRange(2), default=16, help="Streams at a time; half of them are changed.")
@click.option("--seed", type=int, default=0, help="Seed of what is changed when.")
@places()
@csv_option("a row for each change")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(csv_file: Path | None, serve_flags: Sequence[str], **options: Any) -> None:
    """Change running answers under load.

    All streams run once without changes, and then in rounds, in which half of them are changed at random times. The exit
    code is 1 if the text of a stream that was not changed is another one. SERVE_FLAGS after -- go to `uma-trio serve`.
    """
    place = Place.of(options)
    place.show()
    n_streams, rng = options["streams"], random.Random(options["seed"])

    async def work() -> tuple[list[Change], int, int]:
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=n_streams, ctx=512 * n_streams)
        changed: list[Change] = []
        n_compared = n_other = 0
        async with temporary_daemon([*uma_trio_flags(serving), *EXACT, *serve_flags]) as daemon:
            with pinned(daemon.pid, place.pins):
                whole = await one_round(daemon.path, n_streams, rng, n_changed=0)
                for _ in range(options["rounds"]):
                    for stream in await one_round(daemon.path, n_streams, rng, n_changed=n_streams // 2):
                        if stream.change is not None:
                            changed.append(stream.change)
                        else:
                            n_compared += 1
                            n_other += stream.ids != whole[stream.number].ids
        return changed, n_compared, n_other

    changed, n_compared, n_other = carry_out(work)
    file = RunsFile(csv_file, ["kind", "delay_tokens", "ms"])
    for change in changed:
        file.add(change.kind, change.delay_tokens, change.ms)
    click.echo(show(changed, n_compared, n_other))
    if n_other:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
