"""What a person waits for, on stderr: a place in the queue, a model that is loaded, and the prefill of a long prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import trio

from uma_trio.client import Event, Forecast, LoadProgress, PrefillProgress, open_client
from uma_trio.protocol.answers import ModelDescription

if TYPE_CHECKING:
    from rich.progress import Progress

POLL_S: Final = 0.2
"""How often to look how far a load is."""
SHORT_S: Final = 1.0
"""A load that takes less shows nothing where there is no terminal."""


class ProgressBar:
    """Shows on stderr how far the load of a model is, then the queue, then the prefill of a long prompt.  A context manager.

    A bar appears with the second event of its kind: what is done at once needs none.  Any other event removes it.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._shown: str | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def update(self, event: Event) -> None:
        """Draw, move or remove the bar."""
        match event:
            case LoadProgress():
                self.load(event.model, event.state, event.progress)
            case Forecast(queue_position=0):
                """The prefill has a bar of its own."""
            case Forecast():
                self._remove()
                self._bar = _new_line(in_words(event))
            case PrefillProgress():
                self._show("prefill", event.prefilled_tokens, event.prompt_tokens, "tokens")
            case _:
                self._remove()

    def load(self, model: str, state: str, progress: float) -> None:
        """Draw or move the bar for a model that is loading, or waits for room."""
        what = "loading" if state == "loading" else "waiting for"
        self._show(f"{what} {model}", round(100 * progress), 100, "%")

    def _show(self, title: str, done: int, total: int, unit: str) -> None:
        if title != self._shown:
            self._remove()
            self._shown = title
        elif self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, refresh=True)
        elif done < total:  # otherwise it ends soon
            self._bar = _new_bar(title, done, total, unit)

    def _remove(self) -> None:
        self._shown = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def in_words(forecast: Forecast) -> str:
    """Place and start of a request that waits, for people."""
    seconds = max(1, round(forecast.start_ms / 1e3))
    starts = f"{seconds} s" if seconds < 120 else f"{round(seconds / 60)} min"
    return f"place {forecast.queue_position} in the queue, starts in about {starts}"


def _new_line(text: str) -> Progress:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    line = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True)
    line.add_task(text)
    line.start()
    return line


def _new_bar(title: str, done: int, total: int, unit: str) -> Progress:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    counts = (TaskProgressColumn(),) if unit == "%" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (SpinnerColumn(), TextColumn(escape(title)), BarColumn(), *counts)
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    bar.add_task("", total=total, completed=done)
    bar.start()
    bar.refresh()
    return bar


async def load_with_progress(name: str, socket: str | Path | None) -> ModelDescription:
    """Have the daemon load a model, show how far that is, and return the model.

    Raises:
        ClientError: the daemon cannot be reached, or the model cannot be loaded.
    """
    async with open_client(socket, wait_s=None) as client:
        [model] = await client.models(model=name)
    if model.state == "ready":
        return model
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_show_load, name, socket)
        async with open_client(socket) as client:
            model = await client.manage_model("load", name)
        nursery.cancel_scope.cancel()
    return model


async def _show_load(name: str, socket: str | Path | None) -> None:
    if not sys.stderr.isatty():
        await trio.sleep(SHORT_S)
        click.echo(f"loading {name}", err=True)
        return
    with ProgressBar() as bar:
        while True:
            async with open_client(socket) as client:
                [description] = await client.models(model=name)
            if description.progress is not None:
                bar.load(description.name, description.state, description.progress)
            await trio.sleep(POLL_S)
