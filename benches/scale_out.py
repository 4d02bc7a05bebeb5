"""Several daemons behind a router: how much is prefilled again that one daemon would have had, and what clients see of
daemons that are killed, stopped or drained.

The routers come from PyPI, into an environment of their own; so does aiperf, which sends the load of cells.

python benches/scale_out.py
python benches/scale_out.py --router smg,vllm-router,envoy --daemons 4 --cell chat/200/24/6/turns=6
python benches/scale_out.py --router vllm-router --daemons 3
python benches/scale_out.py --faults kill,stop,drain --conversations 60
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import click
import public_generator as aiperf
import trio
from command import bench, carry_out, choices
from machine import machine
from report import cell, table
from routers import ROUTERS, Worker, routed

from uma_trio.models.packaged import EMBEDDED
from uma_trio.tokenizer.tokenizer import open_vocabulary

try:
    import httpx
except ModuleNotFoundError:
    sys.exit("scale_out.py needs the package httpx, which the extra dev installs: run ./build_llama.sh --dev")

ENVIRONMENT: Final = Path(__file__).resolve().parent.parent / "build" / "routers"
FLAGS: Final = ("--threads", "1", "--drain-timeout-s", "20")
"""All daemons have these."""
REQUEST_S: Final = 60.0
"""A request without an answer after this time counts as lost."""
STOPPED_S: Final = 3.0
"""How long a stopped daemon stands still."""
BETWEEN_FAULTS_S: Final = 4.0
ALONE: Final = "one daemon"
FAULTS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "drain": signal.SIGTERM}
WORDS: Final = [
    "apple",
    "river",
    "stone",
    "music",
    "paper",
    "green",
    "house",
    "light",
    "seven",
    "north",
    "water",
    "under",
    "table",
    "along",
    "sweet",
]


@attrs.frozen(kw_only=True)
class Load:
    """Conversations, some of which begin with the same system prompt."""

    conversations: int
    clients: int
    turns: int
    systems: int
    system_words: int
    user_words: int
    tokens: int
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations of {self.turns} turns, {self.clients} at a time; {self.systems} system prompts of "
            f"{self.system_words} words, turns of {self.user_words} words, answers of at most {self.tokens} tokens"
        )

    def texts(self) -> list[list[str]]:
        """The system prompt of each conversation, and what its user says."""
        rng = random.Random(self.seed)
        systems = [_words(rng, self.system_words) for _ in range(self.systems)]
        return [
            [rng.choice(systems), *[_words(rng, self.user_words) for _ in range(self.turns)]]
            for _ in range(self.conversations)
        ]


def _words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


@attrs.define
class Seen:
    """What the clients have seen."""

    outcomes: Counter[str] = attrs.field(factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    slowest_s: float = 0.0

    @property
    def prefilled(self) -> int:
        return self.prompt_tokens - self.cached_tokens


# -- the load ----------------------------------------------------------------------------------


async def converse(load: Load, url: str, http: httpx.AsyncClient) -> Seen:
    """Have all conversations; an error ends its turn, and the conversation goes on without an answer."""
    seen, waiting = Seen(), load.texts()

    async def client() -> None:
        while waiting:
            system, *turns = waiting.pop()
            messages = [{"role": "system", "content": system}]
            for text in turns:
                messages.append({"role": "user", "content": text})
                messages.append({"role": "assistant", "content": await ask(load, url, http, messages, seen)})

    async with trio.open_nursery() as nursery:
        for _ in range(load.clients):
            nursery.start_soon(client)
    return seen


async def ask(load: Load, url: str, http: httpx.AsyncClient, messages: list[dict[str, str]], seen: Seen) -> str:
    """Send one request, and count how it ends; returns the answer, which is empty if there was none."""
    body = {"model": "embedded", "messages": messages, "max_tokens": load.tokens, "temperature": 0}
    began, text = trio.current_time(), ""
    try:
        answer = await http.post(f"{url}/v1/chat/completions", json=body)
    except httpx.TimeoutException:
        seen.outcomes["lost"] += 1
    except httpx.TransportError as error:
        seen.outcomes[f"connection: {type(error).__name__}"] += 1
    else:
        if answer.status_code == 200:
            seen.outcomes["answered"] += 1
            data: dict[str, Any] = answer.json()
            seen.prompt_tokens += data["usage"]["prompt_tokens"]
            seen.cached_tokens += data["usage"]["prompt_tokens_details"]["cached_tokens"]
            text = data["choices"][0]["message"]["content"] or ""
        else:
            seen.outcomes[f"{answer.status_code} {_reason(answer)}"] += 1
    seen.slowest_s = max(seen.slowest_s, trio.current_time() - began)
    return text


def _reason(answer: httpx.Response) -> str:
    """The code of an error, or ``?`` for one that does not say what it is."""
    try:
        error = answer.json()["error"]
        return str(error.get("code") or error.get("type") or "?") if isinstance(error, dict) else str(error)[:60]
    except (json.JSONDecodeError, KeyError, TypeError):
        return answer.text[:60] or "?"


async def disturb(workers: Sequence[Worker], kinds: Sequence[str], http: httpx.AsyncClient, rng: random.Random) -> None:
    """Until cancelled: do something to one daemon after the other, and bring it back as a supervisor would."""
    while True:
        await trio.sleep(BETWEEN_FAULTS_S)
        worker, kind = rng.choice(workers), rng.choice(kinds)
        with trio.CancelScope(shield=True):
            worker.send(FAULTS[kind])
            if kind == "stop":
                await trio.sleep(STOPPED_S)
                worker.send(signal.SIGCONT)
            else:
                await worker.ended()
                await worker.start(http)
        click.echo(f"  {kind}: daemon at {worker.url}", err=True)


async def measure(load: Load, names: Sequence[str], n_daemons: int, kinds: Sequence[str], environment: Path) -> str:
    """One daemon, then several behind each router; returns a table."""
    click.echo(f"{load}; {n_daemons} daemons of the embedded model, one thread each\n")
    rows = []
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=REQUEST_S) as http:
        ideal: Seen | None = None
        for name in (ALONE, *names):
            async with behind(name, n_daemons, environment, http) as (url, workers), trio.open_nursery() as nursery:
                if kinds and name != ALONE:
                    nursery.start_soon(disturb, workers, kinds, http, random.Random(load.seed))
                seen = await converse(load, url, http)
                nursery.cancel_scope.cancel()
            ideal = ideal or seen
            asked = sum(seen.outcomes.values())
            rows.append((
                *(name, f"{seen.outcomes['answered']} of {asked}", str(seen.prompt_tokens), str(seen.prefilled)),
                *(cell(seen.prefilled / ideal.prefilled, 2), cell(100 * seen.cached_tokens / seen.prompt_tokens, 0)),
                *(cell(seen.slowest_s, 1), "; ".join(f"{n} x {what}" for what, n in seen.outcomes.items() if what != "answered")),
            ))  # fmt: skip
    return table(("behind", "answered", "prompt", "prefilled", "ratio", "cached %", "slowest s", "other"), rows)


@contextlib.asynccontextmanager
async def behind(
    name: str, n_daemons: int, environment: Path, http: httpx.AsyncClient
) -> AsyncIterator[tuple[str, Sequence[Worker]]]:
    """Daemons behind the router ``name``, or one without any; yields the address of both together."""
    with tempfile.TemporaryDirectory(prefix="s") as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        workers = [Worker(folder, n, FLAGS) for n in range(1 if name == ALONE else n_daemons)]
        for worker in workers:
            stack.callback(worker.end)
            await worker.start(http)
        if name == ALONE:
            yield workers[0].url, workers
            return
        async with routed(name, folder, environment, workers, http) as url:
            yield url, workers


# -- aiperf ------------------------------------------------------------------------------------


async def measure_cells(
    cells: Sequence[aiperf.Cell], requests: int, names: Sequence[str], n_daemons: int, environment: Path, goodput: str
) -> str:
    """As ``measure``, with the load of aiperf; returns a table."""
    generator = await aiperf.made(environment)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as text:
        tokenizer = Path(text)
        with open_vocabulary(EMBEDDED) as vocabulary:
            await aiperf.write_tokenizer(generator, EMBEDDED, vocabulary.tokenizer, tokenizer)
        async with httpx.AsyncClient(timeout=REQUEST_S) as http:
            for load in cells:
                ideal = 0.0
                for name in (ALONE, *names):
                    async with behind(name, n_daemons, environment, http) as (url, workers):
                        figures, n_good = await _with_aiperf(generator, load, requests, tokenizer, url, goodput)
                        of_each = [await _prefilled(worker, http) for worker in workers]
                    prefilled = sum(of_each)
                    ideal = ideal or prefilled
                    affinity, busiest = None, None  # where no daemon has got a request
                    if prefilled:
                        affinity, busiest = min(1.0, ideal / prefilled), len(workers) * max(of_each) / prefilled
                    rows.append((
                        *(f"{load} {name}", cell(figures.wall_s, 1), cell(figures.requests_per_s, 2), cell(n_good, 2)),
                        *(cell(figures.ttft_p99_ms, 0), cell(figures.latency_p99_ms, 0), cell(prefilled, 0)),
                        *(cell(affinity, 3), cell(busiest, 2), cell(figures.errors, 0)),
                    ))  # fmt: skip
                    click.echo(rows[-1], err=True)
    header = ("behind", "wall s", "req/s", "good/s", "TTFT p99", "latency p99")
    tokens = ("prefilled", "affinity", "busiest", "errors")
    return table(header + tokens, rows)


async def _with_aiperf(
    generator: aiperf.Generator, load: aiperf.Cell, requests: int, tokenizer: Path, url: str, goodput: str
) -> tuple[aiperf.Figures, float | None]:
    """What aiperf has measured, and requests per second that met the objectives ``goodput``."""
    with tempfile.TemporaryDirectory(prefix="aiperf-") as text:
        out = Path(text)
        arguments = aiperf.arguments(load, requests, model="embedded", url=url, tokenizer=tokenizer, out=out, seed=1)
        session = ("--session-header", "X-Session-Id", "--goodput", goodput)
        figures = await aiperf.run_cell(generator, [*arguments, *session], out)
        export = json.loads((out / aiperf.EXPORT).read_bytes()) if figures.wall_s is not None else {}
    return figures, export.get("goodput", {}).get("avg")


async def _prefilled(worker: Worker, http: httpx.AsyncClient) -> float:
    """Prompt tokens that a daemon has computed since its start."""
    lines = (await http.get(f"{worker.url}/metrics")).text.splitlines()
    return sum([float(line.rpartition(" ")[2]) for line in lines if line.startswith("uma_prompt_tokens_total")])


@bench()
@click.option("--router", "names", default="smg,vllm-router", help=f"Routers, with commas: {', '.join(ROUTERS)}.")
@click.option("--environment", type=click.Path(path_type=Path), default=ENVIRONMENT, show_default=False, help="Folder of the virtual environment for the routers.  [default: build/routers]")  # fmt: skip
@click.option("--daemons", type=click.IntRange(1, 16), default=2)
@click.option("--faults", default="", help=f"Faults at random, with commas: {', '.join(FAULTS)}.")
@click.option("--conversations", type=click.IntRange(1, 10_000), default=24)
@click.option("--clients", type=click.IntRange(1, 256), default=6, help="Conversations at a time.")
@click.option("--turns", type=click.IntRange(1, 100), default=6)
@click.option("--systems", type=click.IntRange(1, 1000), default=4, help="Different system prompts.")
@click.option("--seed", type=int, default=1)
@click.option("--cell", "cells", multiple=True, metavar="CELL", help="Load of aiperf in place of the own one, as of public_load.py: chat/PROMPT/ANSWER/CLIENTS[/shared=TOKENS][/turns=N].  Repeatable.")  # fmt: skip
@click.option("--requests", type=click.IntRange(1, 100_000), default=144, help="Requests of each cell.")
@click.option("--goodput", default="time_to_first_token:1000", help="Objectives, in aiperf's words.")
def main(
    names: str,
    environment: Path,
    daemons: int,
    faults: str,
    conversations: int,
    clients: int,
    turns: int,
    systems: int,
    seed: int,
    cells: Sequence[str],
    requests: int,
    goodput: str,
) -> None:
    """Compare several daemons behind a router with one daemon.

    \b
    affinity   what one daemon prefills, as a share of what all daemons do
    busiest    what the busiest daemon prefills against the mean of all; 1: they share evenly
    """
    load = Load(
        conversations=conversations,
        clients=clients,
        turns=turns,
        systems=systems,
        system_words=120,
        user_words=20,
        tokens=24,
        seed=seed,
    )
    wanted = choices(names, "--router", [*ROUTERS])
    kinds = choices(faults, "--faults", [*FAULTS]) if faults else []
    for line in machine():
        click.echo(line)
    work = partial(measure, load, wanted, daemons, kinds, environment)
    if cells:
        parsed = [aiperf.parse_cell(text) for text in cells]
        work = partial(measure_cells, parsed, requests, wanted, daemons, environment, goodput)
    click.echo(carry_out(work))


if __name__ == "__main__":
    main()
