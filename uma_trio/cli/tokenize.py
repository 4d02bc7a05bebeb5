"""``uma-trio tokenize``: convert text to tokens and back, by the daemon that has the model, or from its file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from uma_trio.cli.client_options import DEFAULT_SOCKET
from uma_trio.cli.completion import model_file
from uma_trio.cli.stdio import fail, read_stdin, to_text

if TYPE_CHECKING:
    from uma_trio.tokenizer.tokenizer import Tokenizer


DAEMON_S: Final = 60.0
"""How long to wait for the daemon."""

Row = tuple[int, tuple[int | None, int | None], bytes]
"""A token: its id, where its bytes are in the text, and its bytes."""
NOWHERE: Final = (None, None)
"""The place of a token whose position is not known."""


@click.command("tokenize")
@click.argument("text", required=False, type=click.UNPROCESSED)
@click.option(
    "--model",
    metavar="NAME|FILE",
    type=click.UNPROCESSED,
    shell_complete=model_file,
    help="GGUF file, or the name of a model of this machine. If not given, the embedded model is used. If the daemon has "
    "loaded a model of this name, it is asked; otherwise the vocabulary is read from the file.",
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
@click.option("--socket", type=click.Path(readable=False), help=DEFAULT_SOCKET)
def command(
    text: str | None,
    model: str | None,
    decode: str | None,
    no_special: bool,
    ids: bool,
    count: bool,
    as_json: bool,
    llama_dir: Path | None,
    socket: str | None,
) -> None:
    """Show the tokens of TEXT.  Without TEXT, or with -, the text is read from stdin.

    Each line is a token: its id, its byte range in the text, and its text in quotes.  A token that is only a part of a
    character is shown by its bytes, such as b'\\xc3'.  Of a file, only the vocabulary is loaded.
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
        answer = _ask(socket, model, tokens=token_ids, parse_special=not no_special)
        if answer is not None:
            decoded = answer.get("text", "")
        else:
            with _tokenizer(model, llama_dir) as tokenizer:
                decoded = tokenizer.decode(token_ids, special=not no_special)
        click.echo(_json({"ids": token_ids, "text": decoded}) if as_json else decoded)
        return
    if ids and count:
        raise click.UsageError("give --ids or --count, not both")
    if text is None or text == "-":
        source = _stdin("no text; give one as an argument or pipe it in")
    else:
        source = to_text(os.fsencode(text), "the text")
    special = not no_special
    answer = _ask(socket, model, text=source, add_special=special, parse_special=special, with_bytes=not (ids or count))
    if not ids and not count:
        _show_tokens(
            _rows_of_file(model, llama_dir, source, special) if answer is None else _rows(answer), as_json=as_json
        )
        return
    if answer is not None:
        tokens = answer["tokens"]
    else:
        with _tokenizer(model, llama_dir) as tokenizer:
            tokens = tokenizer.encode(source, add_special=special, parse_special=special).tolist()
    if count:
        click.echo(len(tokens))
    else:
        click.echo(_json(tokens) if as_json else " ".join(map(str, tokens)))


def _ask(socket: str | None, model: str | None, **fields: Any) -> dict[str, Any] | None:
    """The answer of the daemon, if it has loaded the model of this name and can answer; otherwise ``None``."""
    from uma_trio.cli.model_option import is_path_of_model
    from uma_trio.connect.errors import ClientError
    from uma_trio.connect.query import query
    from uma_trio.connect.reasons import is_locked
    from uma_trio.errors import FrameTooLarge, PromptTooLarge
    from uma_trio.protocol.address import socket_path
    from uma_trio.protocol.answers import bare_name

    path = socket_path(socket)
    # without a lock there is no daemon; connecting could make systemd start one
    if model is None or is_path_of_model(model) or not is_locked(path):
        return None
    try:
        [listed] = query(path, {"type": "models"}, timeout_s=DAEMON_S)
        names = [
            name
            for described in listed["models"]
            if described["state"] == "ready"
            for name in (described["name"], *described["aliases"])
        ]
        if model not in names and bare_name(model) not in names:
            return None
        [answer] = query(path, {"type": "tokenize", "model": model, **fields}, timeout_s=DAEMON_S)
    except (ClientError, TimeoutError, LookupError) as error:
        click.echo(f"uma-trio tokenize: the daemon does not answer ({error}), so the file is read", err=True)
        return None
    if answer.get("code") in (PromptTooLarge.code, FrameTooLarge.code):  # the file has no such limit
        return None
    if answer["event"] == "error":
        fail("tokenize", f"{answer['code']}: {answer['message']}")
    return answer


@contextlib.contextmanager
def _tokenizer(model: str | None, llama_dir: Path | None) -> Iterator[Tokenizer]:
    """The vocabulary; what goes wrong with it, or with what is asked of it, ends the program with 1."""
    from uma_trio.cli.model_option import find_model
    from uma_trio.config import ConfigError
    from uma_trio.engine_link.load_errors import ModelError
    from uma_trio.hub.errors import HubError, NotInstalled
    from uma_trio.models.packaged import EMBEDDED
    from uma_trio.tokenizer.tokenizer import InvalidTokenId
    from uma_trio.tokenizer.vocabulary import vocabulary

    try:
        with vocabulary(find_model(model) or EMBEDDED, llama_dir) as tokenizer:
            yield tokenizer
    except NotInstalled as error:
        hint = "; a model that the daemon was given by its path has no other name here: give its path" if model else ""
        fail("tokenize", f"{error}{hint}")
    except (ModelError, HubError, ConfigError, InvalidTokenId) as error:
        fail("tokenize", str(error))


def _rows(answer: dict[str, Any]) -> list[Row]:
    """The tokens of the daemon's answer."""
    ranges = answer.get("byte_ranges") or [NOWHERE] * len(answer["tokens"])
    return [*zip(answer["tokens"], map(tuple, ranges), map(bytes, answer["bytes"]), strict=True)]


def _rows_of_file(model: str | None, llama_dir: Path | None, text: str, special: bool) -> list[Row]:
    with _tokenizer(model, llama_dir) as tokenizer:
        encoding = tokenizer.encode_with_offsets(text, add_special=special, parse_special=special)
        tokens = encoding.ids.tolist()
        ranges = [NOWHERE] * len(tokens) if encoding.offsets is None else encoding.offsets.tolist()
        return [*zip(tokens, map(tuple, ranges), tokenizer.tokens_to_bytes(tokens), strict=True)]


def _show_tokens(rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        names = ("id", "start", "end", "text", "bytes")
        tokens = [
            dict(zip(names, (token, start, end, token_bytes.decode("utf-8", "replace"), [*token_bytes]), strict=True))
            for token, (start, end), token_bytes in rows
        ]
        click.echo(_json(tokens))
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
    return to_text(read_stdin())
