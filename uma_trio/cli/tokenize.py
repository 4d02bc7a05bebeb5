"""``uma-trio tokenize``: a text as the model's tokens, and back; needs no daemon."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from uma_trio.engine.tokenizer import Tokenizer


@click.command("tokenize", short_help="Show the tokens of a text.")
@click.argument("text", required=False)
@click.option("--model", type=click.Path(path_type=Path), help="GGUF file; the embedded model if not given.")
@click.option("--decode", metavar="IDS", help="Print the text of these token ids instead; - reads them from stdin.")
@click.option(
    "--no-special",
    is_flag=True,
    help="Add no special tokens and read none in TEXT; with --decode, print none.",
)
@click.option("--ids", is_flag=True, help="Print only the ids, on one line.")
@click.option("--count", is_flag=True, help="Print only how many there are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of {id, start, end, text}, or {ids, text}.")
@click.option("--llama-dir", type=click.Path(path_type=Path), help="Folder of the built libllama.")
def command(
    text: str | None,
    model: Path | None,
    decode: str | None,
    no_special: bool,
    ids: bool,
    count: bool,
    as_json: bool,
    llama_dir: Path | None,
) -> None:
    """Show the tokens of TEXT, or of stdin, one a line: id, the bytes of the text that it stands for, and
    its spelling.

    Loads only the model's vocabulary.  Control tokens spelled out in the text count as what they spell,
    unless --no-special is given.  BOS and the like stand for no bytes.  Where the model normalises
    its text, so that tokens cannot be traced back to bytes, there is a - for them (in JSON, null).

    \b
      uma-trio tokenize "The capital of France"
      uma-trio tokenize --decode "1 2 3"
      uma-trio tokenize --ids < file.txt | uma-trio tokenize --decode -
    """
    if decode is not None:
        if text is not None or ids or count:
            raise click.UsageError("--decode takes ids, and goes with --no-special and --json only")
        wanted = _parse_ids(_stdin("no ids") if decode == "-" else decode)
        with _tokenizer(model, llama_dir) as tokenizer:
            _show_text(tokenizer, wanted, special=not no_special, as_json=as_json)
        return
    if text is None:
        said = _stdin("nothing to tokenize; give a text or pipe one in")
    else:
        said = _repaired(os.fsencode(text))
    with _tokenizer(model, llama_dir) as tokenizer:
        if count or ids:
            found = tokenizer.encode(said, add_special=not no_special, parse_special=not no_special).tolist()
            click.echo(len(found) if count else " ".join(map(str, found)))
        else:
            _show_tokens(tokenizer, said, special=not no_special, as_json=as_json)


@contextlib.contextmanager
def _tokenizer(model: Path | None, llama_dir: Path | None) -> Iterator[Tokenizer]:
    """The vocabulary; what goes wrong with it, or with what is asked of it, ends the program with 1."""
    from uma_trio.engine.tokenizer import InvalidTokenId
    from uma_trio.models.loaded import EMBEDDED, ModelError, vocabulary

    try:
        with vocabulary(model or EMBEDDED, llama_dir) as tokenizer:
            yield tokenizer
    except (ModelError, InvalidTokenId) as error:
        click.echo(f"uma-trio tokenize: {error}", err=True)
        sys.exit(1)


def _show_tokens(tokenizer: Tokenizer, text: str, *, special: bool, as_json: bool) -> None:
    encoding = tokenizer.encode_with_offsets(text, add_special=special, parse_special=special)
    tokens = encoding.ids.tolist()
    ranges = [(None, None)] * len(tokens) if encoding.offsets is None else encoding.offsets.tolist()
    rows = list(zip(tokens, ranges, tokenizer.tokens_to_bytes(tokens), strict=True))
    if as_json:
        found = [
            {"id": token, "start": start, "end": end, "text": piece.decode("utf-8", "replace")}
            for token, (start, end), piece in rows
        ]
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    for token, (start, end), piece in rows:
        place = "-" if start is None else f"{start}-{end}"
        click.echo(f"{token:>7}  {place:>11}  {piece.decode('utf-8', 'backslashreplace')!r}")


def _show_text(tokenizer: Tokenizer, ids: list[int], *, special: bool, as_json: bool) -> None:
    text = tokenizer.decode(ids, special=special)
    click.echo(json.dumps({"ids": ids, "text": text}, ensure_ascii=False) if as_json else text)


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    wrong = [word for word in words if not word.removeprefix("-").isdecimal() or len(word) > 20]
    if wrong:
        raise click.UsageError(
            f"{wrong[0][:20]!r} is not a token id; they are whole numbers, with spaces or commas between"
        )
    return [int(word) for word in words]


def _stdin(without: str) -> str:
    if sys.stdin.isatty():
        raise click.UsageError(without)
    return _repaired(sys.stdin.buffer.read())


def _repaired(utf8: bytes) -> str:
    """Neither arguments nor stdin need be UTF-8; what is not becomes U+FFFD."""
    return utf8.decode("utf-8", "replace")
