"""Measure cancellation: time until the KV cells are free, and until the next request has its first token.

python benches/cancel.py --model /tmp/125m.gguf --threads 1 --repeat 20 --csv cancel.csv
python benches/cancel.py --no-rival --long-tokens 4000
"""

from __future__ import annotations

import random
import shlex
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import click
import trio
from command import (
    SERVER,
    Place,
    bench,
    carry_out,
    csv_option,
    places,
    repeat_option,
    rival_option,
    show_rival,
)
from comparison import US, RunsFile
from measure import warm_up
from pinning import pinned
from prompts import of_tokens
from report import cell, table
from rigs import Rig, ServerSettings, llama_server_rig, peers_option, uma_trio_flags, uma_trio_rig

from uma_trio.client import Client, Token, open_client
from uma_trio.demo.load import Daemon
from uma_trio.demo.recording import Question
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.vocabulary import vocabulary

Moment = Literal["prefill", "decode"]
Way = Literal["cancel event", "closed connection"]

QUEUE_S = 0.05
"""Time for the next request to arrive and wait before the first one is cancelled."""
NEXT_TOKENS = 8
"""Prompt tokens of the next request.  They are few, since its wait is measured and not its own work."""
MAX_TOKENS = 1000
"""Generated tokens of the first request without a cancel."""
MAX_TRIES = 4
"""Attempts for each cancel: on a busy machine, a prefill may end before the moment of the cancel."""
NAME = "victim"


@attrs.frozen(kw_only=True)
class Case:
    """When and how the running request is cancelled."""

    server: str
    moment: Moment
    way: Way

    def __str__(self) -> str:
        return f"{self.server}, {self.way} during {self.moment}"


CASES = [
    Case(server=server, moment=moment, way=way)
    for moment in get_args(Moment)
    for server, way in ((US, "cancel event"), (US, "closed connection"), (SERVER, "closed connection"))
]


@attrs.frozen(kw_only=True)
class Measurement:
    """Times of all repeats of a case, in ms; ``None`` if the server does not report it."""

    alone_ms: float
    """TTFT of the next request on an idle server, which is the lower limit."""
    next_ms: Sequence[float]
    """From the cancel to the first token of the next request."""
    free_p50_ms: float | None
    """From the cancel until the KV cells could be given to others."""
    free_max_ms: float | None


@attrs.frozen(kw_only=True)
class Load:
    """The requests."""

    long_tokens: int
    repeat: int
    seed: int

    async def of(self, case: Case, rig: Rig, tokenizer: Tokenizer, place: Place) -> Measurement:
        """Measure ``case``.  Each repeat has new prompts, so that no prefix is reused."""
        rng = random.Random(self.seed)

        def question(n_prompt: int, tokens: int) -> Question:
            return Question(text=of_tokens(tokenizer, rng, n_prompt), raw=True, max_tokens=tokens, ignore_eos=True)

        await warm_up(rig)
        with pinned(rig.pid, place.pins):
            long_s = await _ttft_s(rig, question(self.long_tokens, 1))
            alone_s = [await _ttft_s(rig, question(NEXT_TOKENS, 1)) for _ in range(5)]
            next_s: list[float] = []
            for _ in range(MAX_TRIES * self.repeat):
                # at random distances from the end of a step
                moment_s = rng.uniform(0.2, 0.6) * long_s if case.moment == "prefill" else None
                victim = _Victim(case.way, rig, question(self.long_tokens, MAX_TOKENS), rng.randint(3, 12))
                next_token_s = await _cancel_and_wait(victim, moment_s, rig, question(NEXT_TOKENS, 1))
                next_s += [next_token_s] if next_token_s is not None else []
                if len(next_s) == self.repeat:
                    break
            else:
                raise click.ClickException(
                    f"{case}: the prefill ends before it can be cancelled; make --long-tokens larger"
                )
        snapshot = await rig.transport.snapshot() if isinstance(rig.transport, Daemon) else {}
        return Measurement(
            alone_ms=1e3 * statistics.median(alone_s),
            next_ms=[1e3 * seconds for seconds in next_s],
            free_p50_ms=snapshot.get("cancel_to_free_p50_ms"),
            free_max_ms=snapshot.get("cancel_to_free_max_ms"),
        )

    def serving(self, place: Place) -> ServerSettings:
        """Settings with one sequence, so that the second request waits."""
        ctx = -(-(self.long_tokens + MAX_TOKENS + 16) // 256) * 256
        return ServerSettings(model=place.model, threads=place.threads, parallel=1, ctx=ctx)

    def __str__(self) -> str:
        return f"a prompt of {self.long_tokens} tokens, cancelled {self.repeat} times in each case, seed {self.seed}"


class _Victim:
    """The running request that is cancelled."""

    def __init__(self, way: Way, rig: Rig, question: Question, n_tokens: int) -> None:
        self.n_seen = 0
        self.decodes = trio.Event()
        """Set when it has received ``n_tokens`` tokens."""
        self._way, self._rig, self._question, self._n_tokens = way, rig, question, n_tokens
        self._scope = trio.CancelScope()
        self._client: Client | None = None

    async def run(self) -> None:
        with self._scope:
            if self._way == "closed connection":
                async with self._rig.transport.connect(interactive=False) as connection:
                    await connection.ask(self._question, self._on_token)
                return
            assert isinstance(self._rig.transport, Daemon)
            async with open_client(self._rig.transport.path) as self._client:
                asked = {"prompt": self._question.text, "max_tokens": self._question.max_tokens}
                async for event in self._client.generate(id=NAME, ignore_eos=True, cache_prompt=False, **asked):
                    if isinstance(event, Token):
                        self._on_token(event.text)

    def _on_token(self, _: str) -> None:
        self.n_seen += 1
        if self.n_seen == self._n_tokens:
            self.decodes.set()

    async def cancel(self) -> None:
        if self._client is not None:
            await self._client.cancel(NAME)
        else:
            self._scope.cancel()


async def _cancel_and_wait(victim: _Victim, moment_s: float | None, rig: Rig, question: Question) -> float | None:
    """Cancel ``victim`` while another request waits; return the seconds from the cancel to the first token of that one.

    Args:
        moment_s: cancel after so many seconds, during prefill; ``None``: cancel when it has received some tokens.

    Returns:
        ``None`` if the prefill had ended before the cancel.
    """
    came: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(victim.run)
        if moment_s is None:
            await victim.decodes.wait()
        else:
            await trio.sleep(moment_s)
        nursery.start_soon(_ask, rig, question, came)
        await trio.sleep(QUEUE_S)
        missed = moment_s is not None and victim.n_seen > 0
        cancelled = trio.current_time()
        await victim.cancel()
    return None if missed else came[0] - cancelled


async def _ask(rig: Rig, question: Question, came: list[float]) -> None:
    async with rig.transport.connect(interactive=False) as connection:
        await connection.ask(question, lambda _: came.append(trio.current_time()))


async def _ttft_s(rig: Rig, question: Question) -> float:
    came: list[float] = []
    began = trio.current_time()
    await _ask(rig, question, came)
    return came[0] - began


def show(measurements: dict[Case, Measurement]) -> str:
    header = (
        "", "cancelled during", "by", "KV free p50 ms", "max", "next first token p50 ms", "max", "idle p50 ms", "p50 - idle",
    )  # fmt: skip
    lines = []
    for case, f in measurements.items():
        p50 = statistics.median(f.next_ms)
        lines.append([
            case.server, case.moment, case.way, cell(f.free_p50_ms), cell(f.free_max_ms), cell(p50), cell(max(f.next_ms)),
            cell(f.alone_ms), cell(p50 - f.alone_ms),
        ])  # fmt: skip
    return table(header, lines)


@bench()
@click.option("--long-tokens", type=click.IntRange(64), default=2000, help="Prompt tokens of the cancelled request.")
@click.option("--seed", type=int, default=0, help="Seed of words and moments.")
@places()
@rival_option()
@click.option("--rival-flags", default="", help="Flags of llama-server, such as -b 256.")
@peers_option()
@repeat_option(20, "Cancels for each case.")
@csv_option("a row for each cancel")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(csv_file: Path | None, **options: Any) -> None:
    """Measure how soon a cancel takes effect.

    The server has one sequence. A request with a long prompt runs, and a second one waits. The first request is
    cancelled at a random moment of its prefill, or after some tokens, by a cancel event (uma-trio only) or by closing
    its connection. SERVE_FLAGS after -- go to `uma-trio serve`.

    \b
    KV free            from the cancel until its KV cells can be given to others, by the server's clock (uma-trio only)
    next first token   from the cancel to the first token of the waiting request, by the client's clock
    idle               TTFT of that request on an idle server; the difference is the cost of the cancel

    The table has medians and maxima of --repeat cancels.
    """
    place = Place.of(options)
    load = Load(**{field.name: options[field.name] for field in attrs.fields(Load)})
    place.show()

    async def work() -> dict[Case, Measurement]:
        serving = load.serving(place)
        flags = [*uma_trio_flags(serving), *options["serve_flags"]]
        rigs = {US: partial(uma_trio_rig, flags)}
        if options["rival"]:
            show_rival(options["peers"])
            rigs[SERVER] = partial(llama_server_rig, options["peers"], serving, shlex.split(options["rival_flags"]))
        click.echo(f"servers   {serving}\nload      {load}\n")
        file = RunsFile(csv_file, ["server", "moment", "way", "next_first_token_ms"])
        measurements: dict[Case, Measurement] = {}
        with vocabulary(place.model) as tokenizer:
            for case in CASES:
                if case.server not in rigs:
                    continue
                async with rigs[case.server]() as rig:
                    measurements[case] = await load.of(case, rig, tokenizer, place)
                for ms in measurements[case].next_ms:
                    file.add(case.server, case.moment, case.way, ms)
                click.echo(f"{case}: {statistics.median(measurements[case].next_ms):.1f} ms")
        return measurements

    click.echo(f"\n{show(carry_out(work))}")


if __name__ == "__main__":
    main()
