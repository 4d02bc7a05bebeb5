"""Measure how soon /healthz and /metrics answer while the model computes long prompts.

python benches/http_probes.py --model /tmp/125m.gguf --prompt-tokens 4000
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any, Final

import click
import trio
from command import Place, bench, carry_out, places
from gateway_http import Gateway
from measure import warm_up
from prompts import of_tokens
from report import quantiles, table
from rigs import Rig, uma_trio_rig

from uma_trio.demo.recording import Question
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.vocabulary import vocabulary

try:
    import httpx
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    sys.exit("http_probes.py needs the package httpx, which the extra dev installs: run ./build_llama.sh --dev")

PATHS: Final = ("/healthz", "/metrics")
PAUSE_S: Final = 0.15
"""Between two probes: a snapshot of the metrics may be a tenth of a second old, so each probe needs a new one."""

Measurements = dict[tuple[str, str], list[float]]
"""Milliseconds by path and load."""


async def probe(url: str, repeat: int) -> dict[str, list[float]]:
    """Ask each path ``repeat`` times over one connection."""
    times_by_path: dict[str, list[float]] = {path: [] for path in PATHS}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for path in PATHS:
            (await client.get(path)).raise_for_status()
        for _ in range(repeat):
            for path in PATHS:
                began = trio.current_time()
                (await client.get(path)).raise_for_status()
                times_by_path[path].append(1e3 * (trio.current_time() - began))
            await trio.sleep(PAUSE_S)
    return times_by_path


async def measured(rig: Rig, tokenizer: Tokenizer, prompt_tokens: int, repeat: int) -> Measurements:
    """Probe an idle daemon, and one that computes one new prompt after another."""
    gateway = rig.transport
    assert isinstance(gateway, Gateway)
    url = f"http://{gateway.host}:{gateway.port}"
    rng = random.Random(0)
    await warm_up(rig)
    measurements = {(path, "idle"): times for path, times in (await probe(url, repeat)).items()}

    async def prefill(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        while True:
            question = Question(text=of_tokens(tokenizer, rng, prompt_tokens), raw=True, max_tokens=1, ignore_eos=True)
            task_status.started()
            task_status = trio.TASK_STATUS_IGNORED
            await gateway.ask(question, lambda _: None)

    async with trio.open_nursery() as nursery:
        for _ in range(2):  # while one is sent, the other one computes
            await nursery.start(prefill)
        await trio.sleep(0.5)
        measurements |= {(path, "prefill"): times for path, times in (await probe(url, repeat)).items()}
        nursery.cancel_scope.cancel()
    return measurements


@bench()
@click.option("--prompt-tokens", type=click.IntRange(16), default=4000, help="Tokens of each prompt.")
@click.option("--repeat", type=click.IntRange(1), default=100, help="Probes of each path, idle and during prefill.")
@places()
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def main(prompt_tokens: int, repeat: int, serve_flags: Sequence[str], **options: Any) -> None:
    """Measure /healthz and /metrics over HTTP, idle and during prefill.  SERVE_FLAGS after -- go to `uma-trio serve`."""
    place = Place.of(options)
    place.show()
    context = str(2 * (prompt_tokens + 64))
    flags = ["--model", str(place.model), "--threads", str(place.threads), "--parallel", "2", "--ctx", context]

    async def work() -> Measurements:
        with vocabulary(place.model) as tokenizer:
            async with uma_trio_rig([*flags, *serve_flags], protocol="http") as rig:
                return await measured(rig, tokenizer, prompt_tokens, repeat)

    measurements = carry_out(work)
    click.echo(
        table(
            ("ms", "p50", "p95", "p99", "max"),
            [[f"{path}, {load}", *quantiles(times)] for (path, load), times in measurements.items()],
        )
    )


if __name__ == "__main__":
    main()
