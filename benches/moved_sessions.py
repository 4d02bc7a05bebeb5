"""Measure a session that moves between two daemons: its next turn there, next to a cold start and to one that stayed.

python benches/moved_sessions.py --model /tmp/125m.gguf --threads 1
python benches/moved_sessions.py --tokens 2000 --repeat 2
"""

from __future__ import annotations

import json
import math
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import click
from command import Place, bench, carry_out, csv_option, places, repeat_option
from comparison import RunsFile
from prompts import of_tokens
from report import cell, table
from rigs import ServerSettings, free_port, uma_trio_flags, uma_trio_rig

from uma_trio.tokenizer.vocabulary import vocabulary

try:
    import httpx
except ModuleNotFoundError:
    sys.exit("moved_sessions.py needs the package httpx, which the extra dev installs: run ./build_llama.sh --dev")

NEXT: Final = " and then"
ANSWER_TOKENS: Final = 16
LINES: Final = {"accept": "application/x-ndjson"}


@attrs.frozen
class Turn:
    """One answer."""

    ttft_ms: float
    text: str
    prompt_tokens: int
    cached_tokens: int


async def turn(http: httpx.AsyncClient, url: str, session: str, prompt: str) -> Turn:
    """Send the next prompt of a session over HTTP.

    Raises:
        click.ClickException: the daemon refuses.
    """
    body = {"prompt": prompt, "session_id": session, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    began, first, text = time.perf_counter(), math.nan, []
    async with http.stream("POST", f"{url}/v1/generate", json=body, headers=LINES) as answer:
        if answer.status_code != 200:
            raise click.ClickException((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            event = json.loads(line)
            if event["event"] == "token":
                first = 1e3 * (time.perf_counter() - began) if math.isnan(first) else first
                text.append(event["text"])
            elif event["event"] == "error":
                raise click.ClickException(event["message"])
    usage = event["usage"]
    return Turn(first, "".join(text), usage["prompt_tokens"], usage["cached_tokens"])


@attrs.frozen
class Times:
    """One session that moves, and its twin, which stays."""

    cold_ms: float
    stayed_ms: float
    moved_ms: float
    tokens: int
    prefilled: int
    """Prompt tokens of the turn after the move that were computed."""
    same_text: bool


async def measure(serving: ServerSettings, texts: Sequence[str], folder: Path) -> list[Times]:
    """Begin each session at one daemon and continue it at the other one; then the same with a twin that stays."""
    key = folder / "peers.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    ports = (free_port(), free_port())
    a, b = urls = [f"http://127.0.0.1:{port}" for port in ports]
    one, other = (
        [
            *(*uma_trio_flags(serving), "--http", str(port), "--state-dir", str(folder / str(port))),
            *("--peers", ",".join(urls), "--peers-key", str(key)),
        ]
        for port in ports
    )
    times = []
    async with uma_trio_rig(one), uma_trio_rig(other), httpx.AsyncClient(timeout=600) as http:
        for url in urls:
            await turn(http, url, f"warm up {url}", "Hello")
        for n, text in enumerate(texts):
            cold = await turn(http, a, f"moves {n}", text)
            moved = await turn(http, b, f"moves {n}", NEXT)
            # not before: the twin would go on in the same KV cache, and its longer state does not move
            await turn(http, a, f"stays {n}", text)
            stayed = await turn(http, a, f"stays {n}", NEXT)
            prefilled = moved.prompt_tokens - moved.cached_tokens
            same = moved.text == stayed.text
            times.append(Times(cold.ttft_ms, stayed.ttft_ms, moved.ttft_ms, moved.prompt_tokens, prefilled, same))
    return times


def show(times: Sequence[Times]) -> str:
    """A row for each kind of turn, relative to a cold start."""
    cold = statistics.median(session.cold_ms for session in times)
    rows = []
    for name, key in (("cold", "cold_ms"), ("stayed", "stayed_ms"), ("moved", "moved_ms")):
        values = [getattr(session, key) for session in times]
        p50 = statistics.median(values)
        rows.append([name, cell(p50), cell(max(values)), f"{p50 / cold:.2%}"])
    prefilled = ", ".join(f"{session.prefilled} of {session.tokens}" for session in times)
    same = sum(session.same_text for session in times)
    return (
        f"{table(('session', 'TTFT p50 ms', 'max', 'of cold'), rows)}\n\n"
        f"prompt tokens computed after the move: {prefilled}\nsame texts as if it had stayed: {same} of {len(times)}"
    )


@bench()
@click.option("--tokens", type=click.IntRange(32), default=4000, help="Tokens of each session.")
@click.option("--seed", type=int, default=0, help="Seed of the words.")
@places()
@repeat_option(3, "Sessions.")
@csv_option("a row for each session")
def main(tokens: int, seed: int, repeat: int, csv_file: Path | None, **options: object) -> None:
    """Measure the TTFT of a session's first turn (cold), and of its next one at the same and at another daemon."""
    place, rng = Place.of(options), random.Random(seed)
    place.show()
    with vocabulary(place.model) as tokenizer, tempfile.TemporaryDirectory(prefix="m") as folder:
        texts = [of_tokens(tokenizer, rng, tokens) for _ in range(repeat)]
        window = -(-(tokens + 128) // 256) * 256
        serving = ServerSettings(model=place.model, threads=place.threads, parallel=4, ctx=4 * window)
        click.echo(f"server    two of {serving}\nload      {repeat} sessions of {tokens} tokens, seed {seed}\n")
        times = carry_out(lambda: measure(serving, texts, Path(folder)))
    file = RunsFile(csv_file, ["session", *[field.name for field in attrs.fields(Times)]])
    for n, session in enumerate(times, 1):
        file.add(n, *attrs.astuple(session))
    click.echo(show(times))


if __name__ == "__main__":
    main()
