"""What the benches' command lines have in common."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click
from machine import machine
from pinning import Pins, parse_pins
from rigs import NoPeer, peer, same_library

from uma_trio.cli.running import run
from uma_trio.client import ClientError
from uma_trio.demo.temporary_daemon import DaemonStartError, Interrupted, until_interrupted
from uma_trio.engine.cores import default_threads
from uma_trio.models.loaded import EMBEDDED, ModelError

T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

SERVER = "llama-server"
FILE = click.Path(dir_okay=False, path_type=Path)


def bench() -> Callable[[Callable[..., Any]], click.Command]:
    """A command with this project's manners."""
    manners = {"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 110}
    return click.command(context_settings=manners)


def places() -> Decorator:
    """Model, threads and cores: the same for every server of a bench.  See ``Place``."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((
            click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=EMBEDDED, show_default=False, help="GGUF to serve; the embedded one if not given."),
            click.option("--threads", type=click.IntRange(1), help="Compute threads of every server.  [default: all physical cores but one]"),
            click.option("--pin", "pin_text", default="auto", help="Cores, SERVER:LOAD GENERATOR as in 0-2:3; none; auto: the last one for the load generator, the others for the server, if it has one for each thread (Linux only)."),
        )):  # fmt: skip
            function = option(function)
        return function

    return decorated


def csv_option(holds: str) -> Decorator:
    return click.option("--csv", "csv_file", type=FILE, help=f"Write {holds}.")


def repeat_option(default: int, of: str = "Runs of each setting, in turns.") -> Decorator:
    return click.option("--repeat", type=click.IntRange(1), default=default, help=of)


def rival_option() -> Decorator:
    return click.option("--rival/--no-rival", default=True, help="Also llama-server.")


@attrs.frozen(kw_only=True)
class Place:
    """What the options of ``places`` say."""

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

    def tell(self) -> None:
        """The machine: a figure without it is none."""
        for line in [*machine(), f"pin       {self.pins or 'none'}"]:
            click.echo(line)


def tell_rival(folder: Path) -> None:
    """Where llama-server is.

    Raises:
        NoPeer: it is not there.
    """
    peer(folder, SERVER)
    alike = "the same library files as ours" if same_library(folder) else "ANOTHER BUILD of the library than ours"
    click.echo(f"rival     {SERVER} in {folder}, {alike}")


def carry_out(work: Callable[[], Awaitable[T]]) -> T:
    """Run ``work``; what a user can mend is one line, and a signal leaves nothing behind."""
    try:
        return run(until_interrupted, work)
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.number)
    except (ClientError, DaemonStartError, NoPeer, ModelError) as error:
        raise click.ClickException(str(error)) from None


def numbers(text: str, option: str, kind: Callable[[str], Any] = int) -> list[Any]:
    """``1,2,4`` of an option.

    Raises:
        click.BadParameter: that is not what it says.
    """
    try:
        found = [kind(part) for part in text.split(",")]
        if min(found) > 0:
            return found
    except ValueError:
        pass
    raise click.BadParameter("numbers above 0, with commas between", param_hint=option) from None


def choices(text: str, option: str, allowed: Sequence[str]) -> list[str]:
    """``auto,on`` of an option.

    Raises:
        click.BadParameter: that is not what it says.
    """
    found = text.split(",")
    if set(found) <= set(allowed):
        return found
    raise click.BadParameter(f"of {', '.join(allowed)}, with commas between", param_hint=option)
