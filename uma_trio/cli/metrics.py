"""``uma-trio metrics``: print the metrics of the daemon, once or repeatedly."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from uma_trio.cli.client_options import reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.completion import model_name
from uma_trio.cli.exits import SERVER_ERROR
from uma_trio.cli.stdio import print_table

if TYPE_CHECKING:
    import trio
    from rich.live import Live

    from uma_trio.cli.metrics_view import Sample

ANSWER_S: Final = 5.0
"""Time after which a daemon counts as not answering.  It needs a millisecond."""


@click.command("metrics")
@click.option("--watch", is_flag=True, help="Show the most important metrics live, until q or Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.05, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two snapshots.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each snapshot as a line of JSON.")
@click.option("--model", shell_complete=model_name, help="Name of the model to show.  [default: the daemon's first]")
@click.option(
    "--all", "urls", metavar="URL,...", help="Show how busy these daemons are, each in a line, and all together."
)
@click.option(
    "--key-file", type=click.Path(path_type=Path), help="With --all: file with an API key that all of them take."
)
@socket_option()
def command(
    watch: bool,
    interval: float,
    as_json: bool,
    model: str | None,
    urls: str | None,
    key_file: Path | None,
    socket: str | None,
) -> None:
    """Show the metrics of the daemon.  docs/METRICS.md explains every field.

    The daemon answers at once, also during a long prefill.  --watch goes on when the daemon is restarted.  If the
    output is not a terminal, --watch prints JSON.

    --all asks the gateways of several daemons, and docs/SCALE-OUT.md says what each figure means.

    Exit codes: 0 success, 2 the daemon refused, or no daemon (with --all: one of them), 3 protocol error.

    \b
      uma-trio metrics
      uma-trio metrics --watch
      uma-trio metrics --watch --model embedded
      uma-trio metrics --json | jq .tokens_total
      uma-trio metrics --all http://127.0.0.1:8081,http://127.0.0.1:8082
    """
    if urls is not None:
        if watch or model is not None or socket is not None:
            raise click.UsageError("--all goes with --json and --key-file only")
        _show_all([url for url in map(str.strip, urls.split(",")) if url], key_file, as_json)
        return
    from uma_trio.cli.metrics_view import table
    from uma_trio.cli.run_trio import Interrupted, run, until_interrupted

    try:
        with reporting_errors("metrics", socket):
            run(say_which_daemon, "metrics", socket)
            if not watch:
                snapshot = run(_read, socket, model).snapshot
                click.echo(json.dumps(snapshot) if as_json else "\n".join(table(snapshot)))
            elif as_json or not _is_screen():
                run(until_interrupted, lambda: _print(interval, socket, model))
            else:
                run(until_interrupted, lambda: _show(interval, socket, model))
    except Interrupted as interrupted:
        sys.exit(0 if interrupted.number == signal.SIGINT else 128 + interrupted.number)


def _show_all(urls: Sequence[str], key_file: Path | None, as_json: bool) -> None:
    from uma_trio.cli.metrics_all import ask_all, table
    from uma_trio.cli.run_trio import run
    from uma_trio.files import read_text

    if not urls:
        raise click.UsageError("--all needs URLs, such as http://127.0.0.1:8081")
    try:
        key = None if key_file is None else read_text(key_file).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--key-file {key_file}: {error}") from None
    daemons = run(ask_all, urls, key, ANSWER_S)
    if as_json:
        for daemon in daemons:
            click.echo(json.dumps({"url": daemon.url, "load": daemon.load, "reason": daemon.reason}))
    else:
        print_table(table(daemons))
    silent = [daemon for daemon in daemons if daemon.load is None]
    for daemon in silent:
        click.echo(f"uma-trio metrics: {daemon.url}: {daemon.reason}", err=True)
    if silent:
        sys.exit(SERVER_ERROR)


def _is_screen() -> bool:
    """Whether the output is a terminal that can draw."""
    from rich.console import Console

    console = Console()
    return console.is_terminal and not console.is_dumb_terminal


async def _read(socket: str | None, model: str | None) -> Sample:
    """Read one snapshot.

    Args:
        model: whose figures come first; ``None`` for the daemon's first model.

    Raises:
        ClientError: there is no daemon, it does not answer, or it has no such model loaded.
    """
    import trio

    from uma_trio.cli.metrics_view import Sample
    from uma_trio.client import ClientError, open_client

    with trio.move_on_after(ANSWER_S):
        async with open_client(socket) as client:
            name = None if model is None else (await client.models(model=model, keep_alive=True))[0].name
            return Sample(time.monotonic(), _of_model(await client.metrics(), name))
    raise ClientError(f"the daemon has not answered for {ANSWER_S:g} s")


def _of_model(snapshot: dict[str, Any], model: str | None) -> dict[str, Any]:
    """The snapshot with the figures of ``model`` in place of those of the daemon's first model.

    Raises:
        ClientError: it is not loaded.
    """
    from uma_trio.client import ClientError

    if model is None or model == snapshot.get("model"):
        return snapshot
    metrics = (snapshot.get("models", {}).get(model) or {}).get("metrics")
    if metrics is None:
        loaded = [name for name, served in snapshot.get("models", {}).items() if served.get("state") == "ready"]
        raise ClientError(f"no model {model} is loaded; loaded are {', '.join(loaded)}")
    return {**snapshot, **metrics, "model": model}


class _Watch:
    """Reads a snapshot now and then, also across restarts of the daemon."""

    def __init__(self, socket: str | None, model: str | None) -> None:
        from uma_trio.cli.metrics_view import N_SAMPLES

        self._socket, self._model = socket, model
        self._why_none = ""
        """Why the last attempt had no snapshot; empty if it had one."""
        self.samples: deque[Sample] = deque(maxlen=N_SAMPLES)
        self.notice = ""
        """What happened to the daemon last, and when."""

    async def read(self) -> bool:
        """Read a snapshot, or find out that there is no daemon now.  Returns whether there is a new sample.

        Raises:
            ClientError: there was no daemon from the beginning.
        """
        from uma_trio.cli.metrics_view import is_restart
        from uma_trio.client import BrokenProtocol, ClientError, NoDaemon

        try:
            sample = await _read(self._socket, self._model)
        except ClientError as error:
            if not self.samples:
                raise
            why = "the daemon is gone" if isinstance(error, NoDaemon | BrokenProtocol) else str(error)
            if why != self._why_none:  # a daemon that shuts down says so, and then it is gone
                self.notice = f"{_clock()} {why}; the figures are those of before"
            self._why_none = why
            return False
        if self.samples and is_restart(self.samples[-1], sample):
            self.notice = f"{_clock()} the daemon was restarted"
        elif self._why_none:
            self.notice = f"{_clock()} the daemon answers again"
        self._why_none = ""
        self.samples.append(sample)
        return True


def _clock() -> str:
    return time.strftime("%H:%M:%S")


async def _print(interval: float, socket: str | None, model: str | None) -> None:
    """Print a line of JSON for each snapshot, and notices to stderr."""
    import trio

    watch, noticed = _Watch(socket, model), ""
    while True:
        if await watch.read():
            click.echo(json.dumps(watch.samples[-1].snapshot))
        if watch.notice != noticed:
            click.echo(f"uma-trio metrics: {watch.notice}", err=True)
            noticed = watch.notice
        await trio.sleep(interval)


async def _show(interval: float, socket: str | None, model: str | None) -> None:
    """Draw the figures on the whole terminal until q is pressed."""
    import trio
    from rich.console import Console, Group
    from rich.live import Live

    from uma_trio.cli.metrics_view import screen

    watch = _Watch(socket, model)
    await watch.read()
    console = Console(highlight=False)

    def frame() -> Group:
        width, height = console.size
        notice = watch.notice
        return Group(*screen(watch.samples, notice=notice, interval_s=interval, width=width, height=height))

    with (
        trio.open_signal_receiver(signal.SIGWINCH) as resized,
        _unbuffered_keys() as keyboard,
        Live(console=console, screen=True, auto_refresh=False, get_renderable=frame) as live,
    ):
        async with trio.open_nursery() as nursery:
            if keyboard is not None:
                nursery.start_soon(_until_q, keyboard, nursery.cancel_scope)
            nursery.start_soon(_redraw, live, resized)
            while True:
                live.refresh()
                await trio.sleep(interval)
                await watch.read()


@contextlib.contextmanager
def _unbuffered_keys() -> Iterator[int | None]:
    """Let the terminal hand over each key at once and not show it; yields its file, or ``None`` without a terminal."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


async def _until_q(keyboard: int, scope: trio.CancelScope) -> None:
    """Cancel ``scope`` when q is pressed, or the terminal is gone."""
    import trio

    while True:
        await trio.lowlevel.wait_readable(keyboard)
        keys = os.read(keyboard, 64)
        if not keys or b"q" in keys.lower():
            scope.cancel()
            return


async def _redraw(live: Live, resized: AsyncIterator[int]) -> None:
    """Draw again whenever the size of the terminal has changed."""
    async for _ in resized:
        live.refresh()
