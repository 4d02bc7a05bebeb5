"""``uma-trio tokenize``: a text as the model's tokens; needs no daemon."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


@click.command("tokenize", short_help="Show the tokens of a text.")
@click.argument("text", required=False)
@click.option("--model", type=click.Path(path_type=Path), help="GGUF file; the embedded model if not given.")
@click.option("--ids", is_flag=True, help="Print only the ids, on one line.")
@click.option("--count", is_flag=True, help="Print only how many there are.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of {id, text}.")
@click.option("--llama-dir", type=click.Path(path_type=Path), help="Folder of the built libllama.")
def command(
    text: str | None, model: Path | None, ids: bool, count: bool, as_json: bool, llama_dir: Path | None
) -> None:
    """Show the tokens of TEXT, or of stdin, one a line: id and text.

    Loads only the model's vocabulary.  Control tokens spelled out in the text count as what they spell.
    """
    if text is None:
        if sys.stdin.isatty():
            raise click.UsageError("nothing to tokenize; give a text or pipe one in")
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    from uma_trio.models.loaded import EMBEDDED, ModelError, vocabulary

    path = model or EMBEDDED
    try:
        with vocabulary(path, llama_dir) as tokenizer:
            tokens = tokenizer.encode(text)
            pieces = tokenizer.pieces_of(tokens)
    except ModelError as error:
        click.echo(f"uma-trio tokenize: {error}", err=True)
        sys.exit(1)
    if count:
        click.echo(len(tokens))
    elif ids:
        click.echo(" ".join(map(str, tokens.tolist())))
    elif as_json:
        rows = [
            {"id": token, "text": piece.decode("utf-8", "replace")}
            for token, piece in zip(tokens.tolist(), pieces, strict=True)
        ]
        click.echo(json.dumps(rows, ensure_ascii=False))
    else:
        for token, piece in zip(tokens.tolist(), pieces, strict=True):
            click.echo(f"{token:>7}  {piece.decode('utf-8', 'backslashreplace')!r}")
