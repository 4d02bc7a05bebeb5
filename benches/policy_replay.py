"""Simulates the requests of a perf log, and compares the simulation with what the log says.

    uma-trio serve --perf-log perf.jsonl
    python benches/policy_replay.py perf.jsonl

The device of the simulation is a straight line through the ticks of the log.  The requests arrive as in the log, and the
daemon's own ``plan()`` serves them (``policy_sim.py``).  So the difference is what the simulator leaves out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import click
import msgspec
import numpy as np
from policy_sim import Device, Outcome, Request, UmaTrio, simulate
from report import cell, table

from uma_trio.config import Scheduling
from uma_trio.daemon.policy.view import Priority
from uma_trio.telemetry.perf_records import NotAPerfLog, RequestRecord, Run, TickRecord, decode

MIN_TICKS: Final = 50
"""Fewer do not show what a tick costs."""

OUTLIER: Final = 3.0
"""A tick that took so many times as long as the median of its kind was held up by something else."""


@attrs.frozen(kw_only=True)
class Figures:
    """What both the log and the simulation have; means over requests."""

    wall_s: float
    """From the first arrival to the last token."""
    ttft_ms: float
    itl_ms: float
    latency_ms: float


def features(tick: TickRecord) -> tuple[float, ...]:
    """One for the tick, and the work that ``Device.ms`` multiplies with a, b, c, d, e and step."""
    n, rows = tick.prompt_tokens, tick.n_decodes
    attention = n * (tick.prefill_context + n / 2)
    return (1.0, n, rows, tick.context_tokens, attention, float(n > 0))


def fitted(run: Run) -> tuple[Device, float, float]:
    """The device of a run, the host's time between two ticks in ms, and the relative error of a tick's time.

    Raises:
        click.ClickException: there are too few ticks.
    """
    ticks = [tick for tick in run.ticks if tick.decode_seq_ids or tick.prefill_chunks]
    if len(ticks) < MIN_TICKS:
        raise click.ClickException(f"the log has {len(ticks)} ticks, and {MIN_TICKS} are needed: log a longer run")
    ms = np.array([tick.duration_ms for tick in ticks])
    work = np.array([features(tick) for tick in ticks])
    kept = np.ones(len(ticks), dtype=bool)
    for kind in (work[:, 5] == 0, work[:, 5] == 1):
        if kind.any():
            kept &= ~kind | (ms < OUTLIER * np.median(ms[kind]))
    weights = 1 / ms[kept]  # relative errors count
    coefficients = np.linalg.lstsq(work[kept] * weights[:, None], ms[kept] * weights, rcond=None)[0]
    error = float(np.std((work[kept] @ coefficients) / ms[kept] - 1))
    gaps = [tick.host_gap_ms for tick in ticks if tick.host_gap_ms is not None]
    a, b, c, d, e, step = (float(value) for value in coefficients)
    header = run.header
    device = Device("log", a, b, c, d, e, step, parallel=header.n_seq_max, n_batch=header.n_batch)
    return device, statistics.mean(gaps) if gaps else 0.0, error


def requests_of(run: Run, settings: Scheduling) -> list[Request]:
    """The requests of a run, by arrival; what they found in the KV cache is no part of their prompts."""
    records = sorted(
        (record for record in run.requests if record.completion_tokens), key=lambda record: record.arrived_s
    )
    if not records:
        raise click.ClickException("no request of the log has an answer")
    start = records[0].arrived_s
    return [
        Request(
            max(1, record.prompt_tokens - record.cached_tokens),
            record.completion_tokens,
            record.arrived_s - start,
            (settings.background_itl_ms if record.priority == "background" else settings.target_itl_ms) / 1e3,
            Priority[record.priority.upper()],
            record.principal,
            n_context=record.cached_tokens,
        )
        for record in records
    ]


def of_log(records: Sequence[RequestRecord]) -> Figures:
    """Figures of the requests in the log."""
    answered = [record for record in records if record.completion_tokens and record.first_token_s is not None]
    return Figures(
        wall_s=max(record.finished_s for record in answered) - min(record.arrived_s for record in answered),
        ttft_ms=statistics.mean(record.ttft_ms or 0.0 for record in answered),
        itl_ms=statistics.mean(statistics.mean(record.inter_token_ms) for record in answered if record.inter_token_ms),
        latency_ms=statistics.mean(1e3 * (record.finished_s - record.arrived_s) for record in answered),
    )


def of_simulation(outcome: Outcome, tokens: Sequence[int]) -> Figures:
    """Figures of a simulation.

    Args:
        tokens: of each answer.
    """
    latency = [1e3 * (request.last_token_s - request.arrived_s) for request in outcome.requests]
    ttft = [request.ttft_ms for request in outcome.requests]
    return Figures(
        wall_s=outcome.wall_s,
        ttft_ms=statistics.mean(ttft),
        itl_ms=statistics.mean(
            (all_ms - first) / (n - 1) for all_ms, first, n in zip(latency, ttft, tokens, strict=True) if n > 1
        ),
        latency_ms=statistics.mean(latency),
    )


def show(log: Figures, simulated: Figures) -> str:
    """Both, and the ratio of the simulation to the log."""
    names = [field.name for field in attrs.fields(Figures)]
    rows = [
        ["the log", *(cell(value, 2) for value in attrs.astuple(log))],
        ["simulated", *(cell(value, 2) for value in attrs.astuple(simulated))],
        [
            "ratio",
            *(
                cell(mine / theirs, 3)
                for mine, theirs in zip(attrs.astuple(simulated), attrs.astuple(log), strict=True)
            ),
        ],
    ]
    return table(["", *(name.replace("_", " ") for name in names)], rows)


def replay(run: Run, seed: int) -> tuple[Figures, Figures, Device, float]:
    """Figures of the log and of its simulation, the device, and the relative error of its ticks."""
    settings = msgspec.convert(run.header.scheduling, Scheduling)
    device, host_ms, error = fitted(run)
    requests = requests_of(run, settings)
    tokens = [request.n_to_generate for request in requests]
    policy = UmaTrio(device, settings)
    outcome = simulate(device, policy, requests, noise=error, seed=seed, on_finished=lambda _: None, host_ms=host_ms)
    return of_log(run.requests), of_simulation(outcome, tokens), device, error


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--run", "number", type=click.IntRange(1), help="Which start of the daemon.  [default: the last one]")
@click.option("--seed", type=int, default=1, help="Seed of the noise.")
def main(log: Path, number: int | None, seed: int) -> None:
    """Simulate the requests of a perf log, and compare the result with the log."""
    try:
        runs = decode(log.read_bytes())
    except NotAPerfLog as error:
        raise click.ClickException(str(error)) from None
    if (number or 1) > len(runs):
        raise click.ClickException(f"the log has {len(runs)} runs")
    logged, simulated, device, error = replay(runs[(number or len(runs)) - 1], seed)
    coefficients = ", ".join(f"{name} {getattr(device, name):.4g}" for name in ("a", "b", "c", "d", "e", "step"))
    click.echo(f"device    {coefficients}; ticks are {error:.1%} off\n\n{show(logged, simulated)}")


if __name__ == "__main__":
    main()
