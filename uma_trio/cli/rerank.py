"""``uma-trio rerank``: rank documents by how well they answer a query."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Final

import click

from uma_trio.cli.client_options import reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.completion import model_name
from uma_trio.cli.stdio import MAX_BYTES, read_stdin, to_text
from uma_trio.files import read_bytes

SHOWN_CHARS: Final = 100
"""Length of a document on a terminal."""


@click.command("rerank")
@click.argument("query")
@click.argument("documents", nargs=-1, metavar="[DOCUMENT]...")
@click.option(
    "--file",
    "-f",
    "file",
    type=click.Path(allow_dash=True, dir_okay=False, path_type=Path),
    help="File with a document on each line, after those of the command line; - is stdin.",
)
@click.option("--top-n", "-n", type=click.IntRange(min=1), help="Show only this many of the best documents.")
@click.option("--model", shell_complete=model_name, help="Name of the model.  [default: the daemon's first]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a document: {index, score, document}.")
@socket_option()
def command(
    query: str,
    documents: tuple[str, ...],
    file: Path | None,
    top_n: int | None,
    model: str | None,
    as_json: bool,
    socket: str | None,
) -> None:
    """Rank documents by how well they answer QUERY, the best one first.

    Each line has the model's score and the document.  Only the order of the scores has a meaning.  The daemon must
    serve a reranker, a model with a classification head: uma-trio models shows what a model can do.

    \b
      uma-trio rerank "What is a panda?" "A bear that eats bamboo." "A city in Peru."
      uma-trio rerank --top-n 3 --file notes.txt "How do I make pancakes?"

    Exit codes: 0 success, 2 the daemon refused, or no daemon, 3 protocol error.
    """
    texts = [*documents, *_lines(file)]
    if not texts:
        raise click.UsageError("no documents: give them as arguments, or one on each line of --file")
    from uma_trio.cli.generation import asked
    from uma_trio.cli.run_trio import run

    with reporting_errors("rerank", socket):
        run(say_which_daemon, "rerank", socket)
        question = partial(asked, socket, wait_s=0)
        ranking = run(question, lambda client: client.rerank(query, texts, top_n=top_n, model=model))
    for result in ranking.results:
        text = texts[result.index]
        if as_json:
            line = {"index": result.index, "score": result.score, "document": text}
            click.echo(json.dumps(line, ensure_ascii=False))
        else:
            click.echo(f"{result.score:>9.4f}  {_one_line(text)}")


def _lines(file: Path | None) -> list[str]:
    """Lines of a file that are not empty.  What is not UTF-8 becomes U+FFFD."""
    if file is None:
        return []
    try:
        text = (
            to_text(read_stdin()) if str(file) == "-" else to_text(read_bytes(file, MAX_BYTES, pipes=True), str(file))
        )
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
    return [line for line in text.splitlines() if line.strip()]


def _one_line(text: str) -> str:
    """The document on one line; on a terminal its beginning."""
    line = " ".join(text.split())
    if sys.stdout.isatty() and len(line) > SHOWN_CHARS:
        return line[: SHOWN_CHARS - 1] + "…"
    return line
