"""Options and helpers that the command lines of the benches share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click
from machine import machine
from pinning import Pins, parse_pins
from rigs import RivalError, peer, same_library

from uma_trio.cli.run_trio import Interrupted, run, until_interrupted
from uma_trio.client import ClientError
from uma_trio.engine_link.load_errors import ModelError
from uma_trio.models.packaged import EMBEDDED
from uma_trio.processes.machine import default_threads

T = TypeVar("T")

PIN_HELP = (
    "Cores of the server and the load generator, such as 0-2:3.  none: no pinning.  auto: the last core for the load "
    "generator and the others for the server, if it has a core for each thread (Linux only)."
)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

SERVER = "llama-server"
FILE = click.Path(dir_okay=False, path_type=Path)


def bench() -> Callable[[Callable[..., Any]], click.Command]:
    """A click command that shows defaults and has ``-h``."""
    settings = {"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 110}
    return click.command(context_settings=settings)


def places() -> Decorator:
    """Options for model, threads and cores, which all servers of a bench share.  See ``Place``."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((
            click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=EMBEDDED, show_default=False, help="GGUF file to serve.  [default: the embedded model]"),
            click.option("--threads", envvar="UMA_THREADS", type=click.IntRange(1), help="Compute threads of every server.  [default: all physical cores but one]"),
            click.option("--pin", "pin_text", default="auto", help=PIN_HELP),
        )):  # fmt: skip
            function = option(function)
        return function

    return decorated


def csv_option(holds: str) -> Decorator:
    return click.option("--csv", "csv_file", type=FILE, help=f"Write {holds}.")


def repeat_option(default: int, of: str = "Runs of each setting, alternating.") -> Decorator:
    return click.option("--repeat", type=click.IntRange(1), default=default, help=of)


def plot_option(shows: str) -> Decorator:
    """``--plot``, which fails at once if matplotlib is missing."""

    def check(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None and importlib.util.find_spec("matplotlib") is None:
            raise click.ClickException("--plot needs matplotlib: run ./build_llama.sh --dev")
        return value

    return click.option("--plot", "plot_file", type=FILE, callback=check, help=f"Write a plot of {shows}.")


def rival_option() -> Decorator:
    return click.option("--rival/--no-rival", default=True, help="Compare with llama-server.")


@attrs.frozen(kw_only=True)
class Place:
    """Values of the options of ``places``."""

    model: Path
    threads: int
    pins: Pins | None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Place:
        threads = options["threads"] or default_threads()
        try:
            pins = parse_pins(options["pin_text"], threads)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--pin") from None
        return cls(model=options["model"], threads=threads, pins=pins)

    def show(self) -> None:
        """Print the machine and the cores."""
        for line in [*machine(), f"pin       {self.pins or 'none'}"]:
            click.echo(line)


def show_rival(folder: Path) -> None:
    """Print the folder of llama-server, and whether it uses the same library as uma-trio.

    Raises:
        RivalError: there is no llama-server.
    """
    peer(folder, SERVER)
    alike = (
        "with the library files of uma-trio"
        if same_library(folder)
        else "with ANOTHER BUILD of the library than uma-trio"
    )
    click.echo(f"rival     {SERVER} in {folder}, {alike}")


def carry_out(work: Callable[[], Awaitable[T]]) -> T:
    """Run ``work``; report errors that a user can fix in one line, and clean up after a signal."""
    try:
        return run(until_interrupted, work)
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.number)
    except (ClientError, RivalError, ModelError) as error:
        raise click.ClickException(str(error)) from None


def numbers(text: str, option: str, kind: Callable[[str], Any] = int) -> list[Any]:
    """Parse the value of an option such as ``1,2,4``.

    Raises:
        click.BadParameter: it is not a list of numbers above 0.
    """
    try:
        values = [kind(part) for part in text.split(",")]
        if min(values) > 0:
            return values
    except ValueError:
        pass
    raise click.BadParameter("expected numbers above 0, separated by commas", param_hint=option) from None


def choices(text: str, option: str, allowed: Sequence[str]) -> list[str]:
    """Parse the value of an option such as ``auto,on``.

    Raises:
        click.BadParameter: one of the values is not in ``allowed``.
    """
    values = text.split(",")
    if set(values) <= set(allowed):
        return values
    raise click.BadParameter(f"expected values of {', '.join(allowed)}, separated by commas", param_hint=option)
