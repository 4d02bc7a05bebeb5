"""Repeat the choice of the KV cache's layout that a first start makes: is it stable, and is it right?

For new devices.  Needs the library for that device (UMA_LLAMA_DIR selects one), and a model of the size that it will
serve.  ``kv_layout.py`` measures the same with longer contexts, and ``mixed_load.py -- --kv-unified off`` the effect.

    python benches/layout_choice.py --model /tmp/7b.gguf --repeat 5
"""

from __future__ import annotations

import time
from pathlib import Path

import click
from machine import machine

from uma_trio import config
from uma_trio.engine.layout import KeptLayout, LayoutCache, LayoutChoice, MeasuredLayout
from uma_trio.engine.llama import LlamaEngine
from uma_trio.models.packaged import EMBEDDED


class TimingCache(LayoutCache):
    """A layout cache that stores nothing, so that each start measures, and that times the measurement."""

    def __init__(self) -> None:
        self.began_s = self.took_s = 0.0

    def load(self, environment: tuple[object, ...], trial_s: float) -> KeptLayout | None:
        self.began_s = time.perf_counter()
        return None

    def save(self, environment: tuple[object, ...], choice: LayoutChoice, trial_s: float) -> bool:
        self.took_s = time.perf_counter() - self.began_s
        return False


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=EMBEDDED,
    show_default=False,
    help="GGUF file to load.  [default: the embedded model]",
)
@click.option("--repeat", type=click.IntRange(1), default=5, help="Starts.")
@click.option("--parallel", type=click.IntRange(1, 256), default=8, help="Sequences.")
@click.option("--ctx", type=click.IntRange(0), default=0, help="KV cache in tokens; 0: as serve.")
@click.option(
    "--threads", envvar="UMA_THREADS", type=click.IntRange(0), default=0, help="Compute threads; 0: as serve."
)
@click.option("--type-v", type=click.Choice(["f16", "q8_0", "q4_0"]), default="f16", help="Type of the V cache.")
@click.option("--gpu-layers", type=click.IntRange(-1), default=-1, help="Layers on the GPU, if there is one; -1: all.")
@click.option(
    "--budget",
    type=click.FloatRange(0.001),
    default=60.0,
    help="Seconds for the measurement; see layout_trial_s in docs/CONFIG.md.",
)
def main(model: Path, repeat: int, budget: float, **settings: int | str) -> None:
    """Show the measurements and the choice of several starts, in ms.

    The cost is that of the mean tick.  The first line of each start is the default layout.  If streams alone take too long
    already, mixed ticks are not measured, and the cost is a lower bound.
    """
    for line in machine():
        click.echo(line)
    click.echo(f"model     {model.name}, {', '.join(f'{name} {value}' for name, value in settings.items())}\n")
    click.echo(f"| start | {'layout':<38} | decode | mixed | cost | of default | chosen |")
    click.echo(f"|---:|{'-' * 40}|---:|---:|---:|---:|---|")
    for start in range(1, repeat + 1):
        choices = TimingCache()
        engine = LlamaEngine(model, config.Model(layout_trial_s=budget, **settings), layout_cache=choices)  # type: ignore[arg-type]
        choice = engine.layout_choice
        engine.close()
        for measured in choice.measured:
            click.echo(_row(start, measured, choice))
        if choice.why != "measured":
            click.echo(f"| {start} | {choice.layout.name:<38} | | | | | {choice.why} |")
        elif choice.measured:
            click.echo(f"| {start} | {f'in all {choices.took_s:.2f} s':<38} | | | | | |")


def _row(start: int, measured: MeasuredLayout, choice: LayoutChoice) -> str:
    share = measured.cost_ms / choice.measured[0].cost_ms
    chosen = "yes" if choice.why == "measured" and measured.layout == choice.layout else ""
    mixed = "" if measured.mixed_ms is None else f"{measured.mixed_ms:.2f}"
    return (
        f"| {start} | {measured.layout.name:<38} | {measured.decode_ms:.2f} | {mixed} | {measured.cost_ms:.2f} "
        f"| {share:.2f} | {chosen} |"
    )


if __name__ == "__main__":
    main()
