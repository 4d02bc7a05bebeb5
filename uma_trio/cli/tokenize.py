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

from uma_trio.cli.completion import model_file

if TYPE_CHECKING:
    from uma_trio.engine.tokenizer import Tokenizer


@click.command("tokenize")
@click.argument("text", required=False, type=click.UNPROCESSED)
@click.option(
    "--model",
    metavar="NAME|FILE",
    type=click.UNPROCESSED,
    shell_complete=model_file,
    help="GGUF file, or the name of a model of this machine. If not given, the embedded model is used. The vocabulary is "
    "read from the file, without the daemon.",
)
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
    help="Print JSON: a list of {id, start, end, text, bytes}; with --ids a list of numbers, with --count a number, and "
    "with --decode {ids, text}.",
)
@click.option("--llama-dir", type=click.Path(path_type=Path), help="Folder of the built libllama.")
def command(
    text: str | None,
    model: str | None,
    decode: str | None,
    no_special: bool,
    ids: bool,
    count: bool,
    as_json: bool,
    llama_dir: Path | None,
) -> None:
    """Show the tokens of TEXT.  Without TEXT, or with -, the text is read from stdin.

    Each line is a token: its id, its byte range in the text, and its text in quotes.  A token that is only a part of a
    character is shown by its bytes, such as b'\\xc3'.  Only the vocabulary of the model is loaded.
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
            raise click.UsageError("--decode takes token ids, and none of TEXT, --ids and --count")
        token_ids = _parse_ids(_stdin("no token ids; pipe them in") if decode == "-" else decode)
        with _tokenizer(model, llama_dir) as tokenizer:
            decoded = tokenizer.decode(token_ids, special=not no_special)
            click.echo(_json({"ids": token_ids, "text": decoded}) if as_json else decoded)
        return
    if ids and count:
        raise click.UsageError("give --ids or --count, not both")
    if text is None or text == "-":
        source = _stdin("no text; give one as an argument or pipe it in")
    else:
        source = _to_text(os.fsencode(text))
    with _tokenizer(model, llama_dir) as tokenizer:
        if not ids and not count:
            _show_tokens(tokenizer, source, special=not no_special, as_json=as_json)
            return
        found = tokenizer.encode(source, add_special=not no_special, parse_special=not no_special).tolist()
    if count:
        click.echo(len(found))
    else:
        click.echo(_json(found) if as_json else " ".join(map(str, found)))


@contextlib.contextmanager
def _tokenizer(model: str | None, llama_dir: Path | None) -> Iterator[Tokenizer]:
    """The vocabulary; what goes wrong with it, or with what is asked of it, ends the program with 1."""
    from uma_trio.cli.model_option import find_model
    from uma_trio.config import ConfigError
    from uma_trio.engine.tokenizer import InvalidTokenId
    from uma_trio.hub.errors import HubError, NotInstalled
    from uma_trio.models.load_errors import ModelError
    from uma_trio.models.loaded import EMBEDDED, vocabulary

    try:
        with vocabulary(find_model(model) or EMBEDDED, llama_dir) as tokenizer:
            yield tokenizer
    except NotInstalled as error:
        hint = "; a model that the daemon was given by its path has no other name here: give its path" if model else ""
        click.echo(f"uma-trio tokenize: {error}{hint}", err=True)
        sys.exit(1)
    except (ModelError, HubError, ConfigError, InvalidTokenId) as error:
        click.echo(f"uma-trio tokenize: {error}", err=True)
        sys.exit(1)


def _show_tokens(tokenizer: Tokenizer, text: str, *, special: bool, as_json: bool) -> None:
    encoding = tokenizer.encode_with_offsets(text, add_special=special, parse_special=special)
    tokens = encoding.ids.tolist()
    ranges = [(None, None)] * len(tokens) if encoding.offsets is None else encoding.offsets.tolist()
    rows = list(zip(tokens, ranges, tokenizer.tokens_to_bytes(tokens), strict=True))
    if as_json:
        names = ("id", "start", "end", "text", "bytes")
        found = [
            dict(zip(names, (token, start, end, token_bytes.decode("utf-8", "replace"), [*token_bytes]), strict=True))
            for token, (start, end), token_bytes in rows
        ]
        click.echo(_json(found))
        return
    for token, (start, end), token_bytes in rows:
        place = "-" if start is None else f"{start}-{end}"
        click.echo(f"{token:>7}  {place:>11}  {_quoted(token_bytes)}")


def _quoted(token_bytes: bytes) -> str:
    """Show the text of a token as a Python literal, or its bytes if they are not whole characters."""
    try:
        return repr(token_bytes.decode())
    except UnicodeDecodeError:
        return repr(token_bytes)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parse_ids(text: str) -> list[int]:
    """Parse numbers with spaces or commas between them; brackets around them, as in JSON, are allowed."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
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
