"""``uma-trio batch``: answer a file of requests when nobody else needs the model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from uma_trio.cli.client_options import reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.exits import FAILED, INTERRUPTED
from uma_trio.cli.stdio import fail

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("batch")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", "-o", type=FILE, help="Where answers are appended.  [default: FILE.output.jsonl]")
@click.option("--errors", type=FILE, help="Where errors of rows are appended.  [default: FILE.errors.jsonl]")
@click.option(
    "--at-a-time",
    type=click.IntRange(1, 4096),
    help="Rows that are answered at a time.  [default: as many as the model answers together]",
)
@socket_option()
def command(file: Path, output: Path | None, errors: Path | None, at_a_time: int | None, socket: str | None) -> None:
    """Answer the requests in FILE, in the scheduling class background: others go first.

    FILE is a batch of OpenAI's API: each line is a JSON object such as this one, without the line break:

    \b
      {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
       "body": {"messages": [{"role": "user", "content": "Hello"}]}}

    The url is /v1/chat/completions, /v1/completions, /v1/responses or /v1/embeddings, the same on all lines.  The daemon
    need not serve HTTP.

    Each answer is appended to the output as soon as it is there, in the order in which answers end.  The same command
    goes on where it was interrupted, and rows that have an answer or an error are not computed again: remove the file of
    errors to try its rows once more.  When the daemon goes away meanwhile, the command waits for the next one.

    \b
      uma-trio batch questions.jsonl
      uma-trio batch questions.jsonl --output answers.jsonl

    Exit codes: 0 all rows have answers, 1 some have errors or a file cannot be used, 2 no daemon, 130 interrupted.
    """
    from uma_trio.cli.run_trio import Interrupted, run, until_interrupted
    from uma_trio.gateway.batches.results import Busy
    from uma_trio.gateway.batches.rows import RowsError

    output = output or file.with_name(f"{file.name}.output.jsonl")
    errors = errors or file.with_name(f"{file.name}.errors.jsonl")
    if len({path.resolve() for path in (file, output, errors)}) < 3:
        raise click.UsageError("FILE, --output and --errors are three files")
    for path in (file, output, errors):
        if path.exists() and not path.is_file():  # to open a pipe would wait for its other end
            raise click.UsageError(f"{path} is no regular file")
    try:
        with reporting_errors("batch", socket):
            n_failed = run(until_interrupted, lambda: _answer_all(file, output, errors, at_a_time, socket))
    except RowsError as error:
        fail("batch", f"{file}: {error}")
    except Busy:
        fail("batch", f"another uma-trio batch writes to {output}")
    except OSError as error:
        fail("batch", f"{error.filename or output}: {error.strerror}")
    except Interrupted:
        click.echo("stopped; the same command goes on with the rows that are left", err=True)
        sys.exit(INTERRUPTED)
    if output.exists():
        click.echo(f"answers: {output}", err=True)
    if n_failed:
        click.echo(f"errors of rows: {errors}", err=True)
        sys.exit(FAILED)


async def _answer_all(file: Path, output: Path, errors: Path, at_a_time: int | None, socket: str | None) -> int:
    """Answer the rows that have no answer yet; returns how many have errors.

    Raises:
        RowsError, Busy, OSError: a file cannot be used.
        ClientError: there is no daemon.
    """
    from uma_trio.config import Config, Listen
    from uma_trio.gateway.application import in_batches
    from uma_trio.gateway.batches.local_run import answer_file

    await say_which_daemon("batch", socket)
    config = Config(listen=Listen(socket=None if socket is None else Path(socket)))
    with _progress() as progress:
        return await answer_file(
            file, output, errors, config=config, endpoints=in_batches(), at_a_time=at_a_time, progress=progress
        )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """Show on stderr how many rows have answers and errors: a bar, or a line at the end where there is no terminal."""
    if not sys.stderr.isatty():
        last = [0, 0, 0]

        def note(*counts: int) -> None:
            last[:] = counts

        yield note
        click.echo("{1:,} of {0:,} rows have answers, {2:,} have errors".format(*last), err=True)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows, {task.fields[failed]:,} errors"), *times)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, failed=0)

        def update(total: int, answered: int, failed: int) -> None:
            bar.update(task, total=total, completed=answered + failed, failed=failed)

        yield update
