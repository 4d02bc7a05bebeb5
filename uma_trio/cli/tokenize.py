"""``uma-trio tokenize``: convert text to tokens and back, without a daemon."""

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
@click.option("--model", type=click.Path(path_type=Path), help="GGUF file. If not given, the embedded model is used.")
@click.option("--decode", metavar="IDS", help="Print the text of these token ids. - reads them from stdin.")
@click.option(
    "--no-special",
    is_flag=True,
    help="Neither add nor recognise special tokens. With --decode, do not print them.",
)
@click.option("--ids", is_flag=True, help="Print only the token ids, on one line.")
@click.option("--count", is_flag=True, help="Print only the number of tokens.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON: a list of {id, start, end, text}, or with --decode {ids, text}.",
)
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
    """Show the tokens of TEXT, or of stdin.

    Each line is a token: its id, its byte range in the text, and its text.  Only the vocabulary of the model is loaded.
    Text that spells a control token becomes that token, unless --no-special is given.  Added tokens such as
    BOS have an empty byte range.  If the tokenizer normalises the text, byte ranges are unknown: they are shown as -,
    and in JSON as null.

    \b
      uma-trio tokenize "The capital of France"
      uma-trio tokenize --decode "1 2 3"
      uma-trio tokenize --ids < file.txt | uma-trio tokenize --decode -
    """
    if decode is not None:
        if text is not None or ids or count:
            raise click.UsageError("--decode takes token ids, and no other options than --no-special and --json")
        token_ids = _parse_ids(_stdin("no token ids; pipe them in") if decode == "-" else decode)
        with _tokenizer(model, llama_dir) as tokenizer:
            _show_text(tokenizer, token_ids, special=not no_special, as_json=as_json)
        return
    source = _stdin("no text; give one as an argument or pipe it in") if text is None else _to_text(os.fsencode(text))
    with _tokenizer(model, llama_dir) as tokenizer:
        if count or ids:
            found = tokenizer.encode(source, add_special=not no_special, parse_special=not no_special).tolist()
            click.echo(len(found) if count else " ".join(map(str, found)))
        else:
            _show_tokens(tokenizer, source, special=not no_special, as_json=as_json)


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
            {"id": token, "start": start, "end": end, "text": token_bytes.decode("utf-8", "replace")}
            for token, (start, end), token_bytes in rows
        ]
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    for token, (start, end), token_bytes in rows:
        place = "-" if start is None else f"{start}-{end}"
        click.echo(f"{token:>7}  {place:>11}  {token_bytes.decode('utf-8', 'backslashreplace')!r}")


def _show_text(tokenizer: Tokenizer, ids: list[int], *, special: bool, as_json: bool) -> None:
    text = tokenizer.decode(ids, special=special)
    click.echo(json.dumps({"ids": ids, "text": text}, ensure_ascii=False) if as_json else text)


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    wrong = [word for word in words if not word.removeprefix("-").isdecimal() or len(word) > 20]
    if wrong:
        raise click.UsageError(
            f"{wrong[0][:20]!r} is not a token id; give whole numbers, separated by spaces or commas"
        )
    return [int(word) for word in words]


def _stdin(message: str) -> str:
    """Read stdin.  If it is a terminal, raise a usage error with ``message``."""
    if sys.stdin.isatty():
        raise click.UsageError(message)
    return _to_text(sys.stdin.buffer.read())


def _to_text(utf8: bytes) -> str:
    """Decode UTF-8.  Arguments and stdin may contain invalid bytes, which become U+FFFD."""
    return utf8.decode("utf-8", "replace")
