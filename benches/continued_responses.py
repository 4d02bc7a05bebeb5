"""Measure the first token of a response that continues an earlier one (``previous_response_id``), also after a restart.

python benches/continued_responses.py --model /tmp/125m.gguf --threads 1
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
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
from sessions import OFFLOAD_NOW, offloaded

from uma_trio.client import open_client
from uma_trio.demo.temporary_daemon import temporary_daemon
from uma_trio.tokenizer.vocabulary import vocabulary

try:
    import openai
except ModuleNotFoundError:
    sys.exit(
        "continued_responses.py needs the package openai, which the extra dev installs: run ./build_llama.sh --dev"
    )

TOKENS: Final = 8
"""Tokens of each answer."""


@attrs.define
class Times:
    """TTFT of one conversation in milliseconds, and how many prompt tokens were not computed."""

    cold_ms: float
    warm_ms: float = 0.0
    warm_cached: int = 0
    restored_ms: float = 0.0
    restored_cached: int = 0


@asynccontextmanager
async def serving(flags: Sequence[str], pins: Any) -> AsyncIterator[tuple[openai.OpenAI, Path]]:
    """A daemon, and OpenAI's client for it."""
    port = free_port()
    async with temporary_daemon([*flags, "--http", str(port)]) as daemon:
        with (
            pinned(daemon.pid, pins),
            openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20, timeout=600
            ) as client,
        ):
            yield client, daemon.path


def respond(client: openai.OpenAI, text: str, previous: str | None = None) -> tuple[float, Any]:
    """Stream a response; returns the milliseconds until its first text, and the response."""
    given: dict[str, Any] = {} if previous is None else {"previous_response_id": previous}
    model, first = client.models.list().data[0].id, 0.0
    began = time.perf_counter()
    with client.responses.create(
        model=model, input=text, stream=True, max_output_tokens=TOKENS, temperature=0, **given
    ) as events:
        for event in events:
            if event.type == "response.output_text.delta" and not first:
                first = 1e3 * (time.perf_counter() - began)
    return first, event.response


async def measure(flags: Sequence[str], texts: Sequence[str], pins: Any) -> list[Times]:
    """Begin a conversation with each text, continue it, and continue it once more after a restart of the daemon."""
    all_times, ids = [], []
    async with serving(flags, pins) as (client, path), open_client(path) as daemon:
        await trio.to_thread.run_sync(respond, client, "Hello")
        for text in texts:
            cold_ms, response = await trio.to_thread.run_sync(respond, client, text)
            times = Times(cold_ms)
            times.warm_ms, response = await trio.to_thread.run_sync(respond, client, "And then?", response.id)
            times.warm_cached = response.usage.input_tokens_details.cached_tokens
            all_times.append(times)
            ids.append(response.id)
        await offloaded(daemon, len(texts))
    async with serving(flags, pins) as (client, _):
        await trio.to_thread.run_sync(respond, client, "Hello")
        for times, previous in zip(all_times, ids, strict=True):
            times.restored_ms, response = await trio.to_thread.run_sync(respond, client, "And then?", previous)
            times.restored_cached = response.usage.input_tokens_details.cached_tokens
    return all_times


def show(all_times: Sequence[Times]) -> str:
    """A row for each way to continue, relative to the first response."""
    cold = statistics.median([times.cold_ms for times in all_times])
    rows = [["first response", cell(cold), "100.0 %", "-"]]
    for name, ms, cached in (
        ("continued", [times.warm_ms for times in all_times], [times.warm_cached for times in all_times]),
        (
            "continued after a restart",
            [times.restored_ms for times in all_times],
            [times.restored_cached for times in all_times],
        ),
    ):
        middle = statistics.median(ms)
        rows.append([name, cell(middle), f"{100 * middle / cold:.1f} %", f"{min(cached):,}"])
    return table(("", "first token ms", "of the first response", "cached tokens, min"), rows)


@bench()
@click.option("--tokens", type=click.IntRange(32), default=8000, help="Tokens of the first input.")
@click.option("--seed", type=int, default=0, help="Seed of words.")
@places()
@repeat_option(3, "Conversations.")
@csv_option("a row for each conversation")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(repeat: int, csv_file: Path | None, serve_flags: Sequence[str], **options: Any) -> None:
    """Measure the first token of responses that continue earlier ones.

    OpenAI's client begins a conversation with a long input, continues it with previous_response_id, and continues it once
    more after the daemon was restarted. SERVE_FLAGS after -- go to `uma-trio serve`.
    """
    place = Place.of(options)
    place.show()
    rng = random.Random(options["seed"])
    window = -(-(options["tokens"] + 512) // 256) * 256

    async def work() -> list[Times]:
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=2, ctx=window * 2)
        click.echo(f"server    {serving}\nload      {repeat} conversations of {options['tokens']} tokens\n")
        with vocabulary(place.model) as tokenizer:
            texts = [of_tokens(tokenizer, rng, options["tokens"]) for _ in range(repeat)]
        with tempfile.TemporaryDirectory() as state:
            flags = [*uma_trio_flags(serving), "--state-dir", state, *OFFLOAD_NOW, *serve_flags]
            return await measure(flags, texts, place.pins)

    all_times = carry_out(work)
    file = RunsFile(csv_file, ["cold_ms", "warm_ms", "restored_ms"])
    for times in all_times:
        file.add(times.cold_ms, times.warm_ms, times.restored_ms)
    click.echo(show(all_times))


if __name__ == "__main__":
    main()
