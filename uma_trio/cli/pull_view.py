"""What a download looks like: a progress bar with rate and time left, or lines where there is no terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import click

from uma_trio.hub.download import PullReporter
from uma_trio.hub.variants import format_bytes

LINE_S: Final = 15.0
"""Seconds between two lines about one download."""


class _Shown:
    """What the sums go to.  Shows nothing."""

    def start(self, name: str, done: int, total: int | None) -> None: ...
    def progress(self, done: int, total: int | None) -> None: ...
    def message(self, text: str) -> None: ...


class View(PullReporter):
    """Adds up the parts of a model, or of its projector after it.

    Args:
        shown: what the sums go to; by default nowhere.
    """

    def __init__(self, shown: _Shown = _Shown()) -> None:  # noqa: B008  (it has no state)
        self._shown = shown
        self._name: str | None = None
        self._done: list[int | None] = []
        self._sizes: list[int | None] = []

    def start(self, name: str, sizes: Sequence[int | None]) -> None:
        if self._name != name:
            self._name = name
            self._done = [None] * len(sizes)
        self._sizes = [*sizes]

    def progress(self, number: int, done: int, size: int | None) -> None:
        is_first = self._done[number] is None
        self._done[number], self._sizes[number] = done, size
        all_done = sum(n_bytes or 0 for n_bytes in self._done)
        total = None if None in self._sizes else sum(n_bytes or 0 for n_bytes in self._sizes)
        if is_first and self._name is not None:
            self._shown.start(self._name, all_done, total)
        else:
            self._shown.progress(all_done, total)

    def message(self, text: str) -> None:
        self._shown.message(text)


@contextlib.contextmanager
def pull_view(*, quiet: bool = False) -> Iterator[View]:
    """A view on stderr until the end of the context."""
    if quiet:
        yield View()
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield View(_Bar(progress))
    else:
        yield View(_Lines())


class _Bar(_Shown):
    """A bar of rich, whose rate does not count what was there before."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task: Any = None

    def start(self, name: str, done: int, total: int | None) -> None:
        if self._task is None:
            self._task = self._progress.add_task(name, total=total, completed=done)
        else:
            self._progress.reset(self._task, total=total, completed=done, description=name)

    def progress(self, done: int, total: int | None) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def message(self, text: str) -> None:
        self._progress.console.print(text, style="dim", markup=False, highlight=False)


class _Lines(_Shown):
    """A line now and then."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._name: str | None = None
        self._shown_at = 0.0
        self._began_at: tuple[float, int] = (0.0, 0)

    def start(self, name: str, done: int, total: int | None) -> None:
        if self._name != name:
            self._name = name
            what = "" if total is None else f", {format_bytes(total)}"
            rest = f", of which {format_bytes(done)} are here" if done else ""
            click.echo(f"downloading {name}{what}{rest}", err=True)
        self._shown_at = self._now()
        self._began_at = self._shown_at, done

    def progress(self, done: int, total: int | None) -> None:
        now = self._now()
        if now < self._shown_at + LINE_S:
            return
        self._shown_at = now
        began, before = self._began_at
        rate = (done - before) / (now - began)
        if total is None or rate <= 0:
            click.echo(f"{format_bytes(done)} are here", err=True)
            return
        left = (total - done) / rate
        click.echo(
            f"{done / total:.0%}, {format_bytes(done)} of {format_bytes(total)}, {format_bytes(round(rate))}/s, {left:,.0f} s left",
            err=True,
        )

    def message(self, text: str) -> None:
        click.echo(text, err=True)
