"""Measure what ticks with prefill take by their rows, and how well they are predicted.

    python benches/stairs.py
    python benches/stairs.py --model 7b.gguf --kv-unified on --csv stairs.csv

For each KV layout: the curves as a start measures them, how long that took, and whether they have stairs.  Then ticks of
8 decodes and a chunk of random size, of prompts of 4,700 tokens one after another, each predicted from those before it, with the
curves and with a line.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import attrs
import click
import trio
from command import carry_out
from comparison import RunsFile
from machine import machine
from report import cell, table

from uma_trio import config
from uma_trio.daemon.engines.calibrate import MAX_CURVE_DECODES, Trial, measured_curves
from uma_trio.daemon.engines.link import ProcessLauncher
from uma_trio.daemon.engines.loaded import open_model
from uma_trio.daemon.policy.cost import CostModel, LinearModel, Work
from uma_trio.daemon.policy.row_curve import RowCurve
from uma_trio.demo.recording import percentile
from uma_trio.models.packaged import EMBEDDED
from uma_trio.processes.machine import default_threads

PROMPT_TOKENS = 4_700
LEARNED_TICKS = 30
"""Ticks of which the errors do not count."""


async def observed(trial: Trial, n_batch: int, n_seq_max: int, n_ctx: int, n_ticks: int) -> list[tuple[Work, float]]:
    """Ticks of random size, with what they held."""
    rng, decodes = random.Random(1), min(MAX_CURVE_DECODES, n_seq_max - 1)
    most = min(PROMPT_TOKENS, n_ctx - 16 - (n_ticks + 400) * decodes)
    if most < n_batch:
        raise click.ClickException(f"a context of {n_ctx} tokens is too small for {n_ticks} ticks")
    for _ in range(400 // 64 * (decodes > 0)):
        for seq in range(decodes):
            await trial.run([(seq, 64)])
    ticks, held = [], 0
    while len(ticks) < n_ticks:
        n = rng.randint(16, n_batch - decodes)
        if held + n > most:
            await trial.empty(decodes)
            held = 0
        ticks.append(await trial.run([*[(seq, 1) for seq in range(decodes)], (decodes, n)]))
        held += n
    await trial.clear()
    return ticks


def errors(cost: CostModel, ticks: list[tuple[Work, float]]) -> list[float]:
    """Relative errors of predictions, in percent, after the first ticks."""
    percents = []
    for work, ms in ticks:
        percents.append(100 * abs(cost.predict(work) / ms - 1))
        cost = cost.observed(work, ms)
    return percents[LEARNED_TICKS:]


def show(name: str, curve: RowCurve, layout: str, file: RunsFile) -> None:
    for rows, ms in zip(curve.rows, curve.ms, strict=True):
        file.add(layout, name, rows, ms)
    click.echo(f"\n{name}: {100 * curve.deviation:.1f} % from a line at most\n")
    click.echo(table(["rows", *map(str, curve.rows)], [["ms", *[cell(ms, 2) for ms in curve.ms]]]))


async def layout(settings: config.Model, n_ticks: int, file: RunsFile) -> None:
    chosen = config.Config(model=settings)
    async with trio.open_nursery() as nursery, open_model(chosen, ProcessLauncher(nursery)) as loaded:
        assert loaded is not None
        info, trial = loaded.info, Trial(loaded.engine.link)
        name_of_layout = "unified" if info.unified else "per-sequence"
        click.echo(f"\n## {info.name}, {name_of_layout} KV, batches of {info.n_batch}\n")
        began = time.perf_counter()
        curves = await measured_curves(trial)
        click.echo(f"measured in {time.perf_counter() - began:.2f} s")
        cost = attrs.evolve(loaded.cost, mixed=CostModel().mixed)
        ticks = await observed(
            trial, info.n_batch, info.n_seq_max, info.n_ctx_seq if not info.unified else info.n_ctx, n_ticks
        )
        models = {"line": cost}
        if curves is None:
            click.echo("no curves: the device is unsteady or too slow")
        else:
            for name, curve in (("prompts alone", curves.prompt), ("next to decodes", curves.mixed)):
                if curve is not None:
                    show(name, curve, name_of_layout, file)
            click.echo("\nstairs: " + ("yes" if curves.has_stairs else "no, the daemon uses the line"))
            with_curves = cost.with_curves(curves)
            if with_curves.mixed.curves is None:
                with_curves = attrs.evolve(cost, mixed=LinearModel((0.0, 10.0, 0.0, 0.0, 0.0), curves=curves))
            models["curves"] = with_curves
        rows = []
        for name, model in models.items():
            percents = errors(model, ticks)
            rows.append([name, *(cell(percentile(percents, at)) for at in (50, 90, 99))])
            file.add(name_of_layout, f"error p90 % with {name}", n_ticks, percentile(percents, 90))
        click.echo(f"\n{n_ticks} ticks of random size\n\n" + table(["error %", "p50", "p90", "p99"], rows))
        nursery.cancel_scope.cancel()


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=EMBEDDED, help="GGUF file."
)
@click.option("--threads", type=click.IntRange(1), help="Compute threads.")
@click.option("--gpu-layers", type=int, default=-1, help="Layers on the GPU; -1: all that fit.")
@click.option(
    "--kv-unified",
    "layouts",
    multiple=True,
    type=click.Choice(["on", "off"]),
    default=["on", "off"],
    help="KV layout; repeatable.",
)
@click.option("--ticks", type=click.IntRange(LEARNED_TICKS + 10), default=200, help="Ticks of random size.")
@click.option(
    "--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a row for each row count."
)
def main(
    model: Path, threads: int | None, gpu_layers: int, layouts: tuple[str, ...], ticks: int, csv_file: Path | None
) -> None:
    """Measure what ticks with prefill take by their rows, and how well they are predicted."""
    click.echo("\n".join(machine()))
    file = RunsFile(csv_file, ["layout", "what", "rows", "value"])

    async def work() -> None:
        for unified in layouts:
            await layout(
                config.Model(
                    model=str(model),
                    threads=threads or default_threads(),
                    parallel=MAX_CURVE_DECODES + 1,
                    ctx=(MAX_CURVE_DECODES + 1) * (PROMPT_TOKENS + 1000),
                    gpu_layers=gpu_layers,
                    kv_unified=unified,
                    layout_trial_s=0,
                ),
                ticks,
                file,
            )

    carry_out(work)


if __name__ == "__main__":
    main()
