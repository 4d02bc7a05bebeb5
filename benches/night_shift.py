"""Measure what a batch costs interactive requests: their latencies alone, next to a batch, and next to the same rows sent
as ordinary requests, in turns on one daemon.

python benches/night_shift.py --model /tmp/125m.gguf --threads 1 --repeat 3
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, places, repeat_option
from comparison import RunsFile
from pinning import pinned
from prompts import of_tokens
from report import cell, table
from rigs import ServerSettings, free_port, uma_trio_flags

from uma_trio.client import Token, open_client
from uma_trio.demo.recording import percentile
from uma_trio.demo.temporary_daemon import TemporaryDaemon, temporary_daemon
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.vocabulary import vocabulary

try:
    import httpx
except ModuleNotFoundError:
    sys.exit("night_shift.py needs the package httpx, which the extra dev installs: run ./build_llama.sh --dev")

ALONE, NEXT_TO_BATCH, NEXT_TO_NORMAL, BATCH_ALONE = (
    "alone",
    "next to a batch",
    "next to ordinary requests",
    "batch alone",
)
SETTINGS: Final = (ALONE, NEXT_TO_BATCH, NEXT_TO_NORMAL, BATCH_ALONE)
SETTLE_S: Final = 1.0
"""From the begin of other work until interactive requests count."""
COMPLETIONS: Final = "/v1/completions"
MANY: Final = 2000
"""Rows of a batch: more than are answered in a run."""


@attrs.define
class Seen:
    """What interactive clients have seen, and how many rows were answered meanwhile."""

    ttft_ms: list[float] = attrs.field(factory=list)
    itl_ms: list[float] = attrs.field(factory=list)
    rows: int = 0
    interrupted: int = 0
    """Ticks of rows that were ended for a request."""
    seconds: float = 0.0
    asked: list[tuple[float, float]] = attrs.field(factory=list)
    """When requests were sent and had ended, in seconds since the beginning of the run."""
    idle_s: float = 0.0
    """For how long no client waited for an answer."""

    def end(self, seconds: float) -> None:
        """The run has ended after so many seconds."""
        self.seconds = self.idle_s = seconds
        until = 0.0
        for sent, ended in sorted(self.asked):
            self.idle_s -= max(0.0, ended - max(until, sent))
            until = max(until, ended)

    def add(self, other: Seen) -> None:
        self.ttft_ms += other.ttft_ms
        self.itl_ms += other.itl_ms
        self.rows += other.rows
        self.interrupted += other.interrupted
        self.seconds += other.seconds
        self.idle_s += other.idle_s


@attrs.frozen(kw_only=True)
class Load:
    """The requests."""

    clients: int
    pause_s: float
    prompt_tokens: int
    tokens: int
    row_prompt_tokens: int
    row_tokens: int
    parallel: int
    seconds: float
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.clients} clients that ask for {self.tokens} tokens after {self.prompt_tokens}, pauses of {self.pause_s:g} s in "
            f"the mean; rows of {self.row_tokens} tokens after {self.row_prompt_tokens}; {self.seconds:g} s a run"
        )

    @property
    def ctx(self) -> int:
        longest = max(self.prompt_tokens + self.tokens, self.row_prompt_tokens + self.row_tokens)
        return self.parallel * (-(-(longest + 32) // 256) * 256)


@attrs.frozen
class Night:
    """A daemon and its load."""

    daemon: TemporaryDaemon
    http: httpx.AsyncClient
    load: Load
    tokenizer: Tokenizer

    async def run(self, setting: str, seed: int) -> Seen:
        """Run one setting."""
        seen = Seen()
        rng = random.Random(seed)
        interrupted = await self._metric("interrupted_steps_total")
        async with self._other_work(setting, rng) as n_rows:
            await trio.sleep(SETTLE_S)
            before, began = await n_rows(), trio.current_time()
            with trio.move_on_after(self.load.seconds):
                async with trio.open_nursery() as nursery:
                    if setting == BATCH_ALONE:
                        nursery.start_soon(trio.sleep_forever)
                    else:
                        for number in range(self.load.clients):
                            nursery.start_soon(self._client, seen, random.Random(f"{seed} {number}"))
            seen.asked = [(sent - began, ended - began) for sent, ended in seen.asked]
            seen.end(trio.current_time() - began)
            seen.rows = await n_rows() - before
        seen.interrupted = await self._metric("interrupted_steps_total") - interrupted
        return seen

    async def _client(self, seen: Seen, rng: random.Random) -> None:
        while True:
            await trio.sleep(rng.expovariate(1 / self.load.pause_s))
            prompt = of_tokens(self.tokenizer, rng, self.load.prompt_tokens)
            last: float | None = None
            sent = trio.current_time()
            try:
                async with open_client(self.daemon.path) as client:
                    async for event in client.generate(prompt=prompt, max_tokens=self.load.tokens, ignore_eos=True):
                        if isinstance(event, Token):
                            now = trio.current_time()
                            (seen.ttft_ms if last is None else seen.itl_ms).append(
                                1e3 * (now - (sent if last is None else last))
                            )
                            last = now
            finally:
                seen.asked.append((sent, trio.current_time()))

    @asynccontextmanager
    async def _other_work(self, setting: str, rng: random.Random) -> AsyncIterator[Any]:
        """Do other work next to the clients; yields a function that counts the rows that were answered."""
        bodies = [
            {
                "prompt": of_tokens(self.tokenizer, rng, self.load.row_prompt_tokens),
                "max_tokens": self.load.row_tokens,
                "ignore_eos": True,
            }
            for _ in range(MANY if setting != ALONE else 0)
        ]
        if setting == NEXT_TO_NORMAL:
            answered = [0]

            async def ask(bodies: Sequence[dict[str, Any]]) -> None:
                for body in bodies:
                    (await self.http.post(COMPLETIONS, json=body)).raise_for_status()
                    answered[0] += 1

            async def n_answered() -> int:
                return answered[0]

            async with trio.open_nursery() as nursery:
                for number in range(self.load.parallel):
                    nursery.start_soon(ask, bodies[number :: self.load.parallel])
                yield n_answered
                nursery.cancel_scope.cancel()
        elif bodies:
            batch_id = await self._begin(bodies)

            async def n_completed() -> int:
                batch = (await self.http.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
                assert not batch["request_counts"]["failed"], batch
                return int(batch["request_counts"]["completed"])

            yield n_completed
            (await self.http.post(f"/v1/batches/{batch_id}/cancel")).raise_for_status()
        else:

            async def none() -> int:
                return 0

            yield none
        while await self._metric("running"):  # noqa: ASYNC110 - in another process
            await trio.sleep(0.05)

    async def _metric(self, name: str) -> int:
        async with open_client(self.daemon.path) as client:
            return int((await client.metrics())[name])

    async def _begin(self, bodies: Sequence[dict[str, Any]]) -> str:
        rows = [
            json.dumps({"custom_id": f"{n}", "method": "POST", "url": COMPLETIONS, "body": body})
            for n, body in enumerate(bodies)
        ]
        file = {"file": ("rows.jsonl", "\n".join(rows).encode())}
        uploaded = (await self.http.post("/v1/files", files=file, data={"purpose": "batch"})).raise_for_status().json()
        request = {"input_file_id": uploaded["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        return str((await self.http.post("/v1/batches", json=request)).raise_for_status().json()["id"])


def show(by_setting: dict[str, Seen], load: Load) -> str:
    """A row for each setting, and the ratios to the first one."""
    alone = by_setting[ALONE]

    def cells(values: Sequence[float], base: Sequence[float]) -> list[str]:
        p50, p99, base_p99 = percentile(values, 50), percentile(values, 99), percentile(base, 99)
        ratio = None if p99 is None or base_p99 is None else p99 / base_p99
        return [cell(p50), cell(p99), cell(ratio, 2)]

    best = by_setting[BATCH_ALONE]
    header = (
        "", "requests", "TTFT p50 ms", "p99", "ratio", "ITL p50 ms", "p99", "ratio", "row tok/s", "of what is left", "interrupted",
    )  # fmt: skip
    lines = []
    for setting, seen in by_setting.items():
        rate = seen.rows * load.row_tokens / seen.seconds
        left = 1.0 if seen is best else alone.idle_s / alone.seconds
        share = rate / (left * best.rows * load.row_tokens / best.seconds) if left else None
        lines.append([
            setting, str(len(seen.ttft_ms)), *cells(seen.ttft_ms, alone.ttft_ms), *cells(seen.itl_ms, alone.itl_ms),
            cell(rate), cell(share, 2), str(seen.interrupted),
        ])  # fmt: skip
    return table(header, lines)


@bench()
@click.option("--clients", type=click.IntRange(1), default=2, help="Interactive clients.")
@click.option(
    "--pause-s", type=click.FloatRange(0.001), default=1.0, help="Mean pause of a client between two requests."
)
@click.option("--prompt-tokens", type=click.IntRange(1), default=100, help="Prompt of an interactive request.")
@click.option("--tokens", type=click.IntRange(2), default=60, help="Tokens of its answer.")
@click.option("--row-prompt-tokens", type=click.IntRange(1), default=200, help="Prompt of a row.")
@click.option("--row-tokens", type=click.IntRange(1), default=60, help="Tokens of its answer.")
@click.option("--parallel", type=click.IntRange(1), default=4, help="Sequences of the daemon.")
@click.option("--seconds", type=click.FloatRange(1), default=30.0, help="Length of a run.")
@click.option("--seed", type=int, default=0, help="Seed of words and pauses.")
@places()
@repeat_option(3)
@csv_option("a row for each run")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(csv_file: Path | None, repeat: int, serve_flags: Sequence[str], **options: Any) -> None:
    """Measure what a batch costs interactive requests.

    Clients that stream short answers run alone, next to a batch of /v1/batches, and next to the same rows sent as
    ordinary requests, as many at a time as the daemon has sequences.  All are requests of one user.  SERVE_FLAGS after
    -- go to `uma-trio serve`.

    \b
    TTFT, ITL            of the interactive requests
    ratio                p99 divided by that of the clients alone
    row tok/s            tokens of rows whose answers have ended
    interrupted          ticks of rows that were ended for a request
    of what is left      these divided by those of a batch alone in the time in which the clients alone asked nothing
    """
    place = Place.of(options)
    load = Load(**{field.name: options[field.name] for field in attrs.fields(Load)})
    place.show()

    async def work() -> dict[str, Seen]:
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=load.parallel, ctx=load.ctx)
        click.echo(f"servers   {serving}\nload      {load}\n")
        file = RunsFile(csv_file, ["setting", "round", "ttft_p99_ms", "itl_p99_ms", "rows", "seconds"])
        by_setting = {setting: Seen() for setting in SETTINGS}
        port = free_port()
        with tempfile.TemporaryDirectory(prefix="uma-night-") as folder, vocabulary(place.model) as tokenizer:
            flags = [*uma_trio_flags(serving), "--http", str(port), "--state-dir", folder, *serve_flags]
            limits = httpx.Limits(max_connections=None)
            async with (
                temporary_daemon(flags) as daemon,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits) as http,
            ):
                night = Night(daemon, http, load, tokenizer)
                with pinned(daemon.pid, place.pins):
                    for number in range(repeat):
                        for setting in SETTINGS:
                            seen = await night.run(setting, load.seed + number)
                            by_setting[setting].add(seen)
                            p99 = [percentile(times_ms, 99) for times_ms in (seen.ttft_ms, seen.itl_ms)]
                            file.add(setting, number, *p99, seen.rows, seen.seconds)
                            click.echo(
                                f"{setting}, run {number + 1}: p99 {cell(p99[0])} and {cell(p99[1])} ms, {seen.rows} rows"
                            )
        return by_setting

    click.echo(f"\n{show(carry_out(work), load)}")


if __name__ == "__main__":
    main()
