"""The options that say what an answer must look like, as the protocol's ``constraint``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from uma_trio.files import read_text

LARK_SUFFIX = ".lark"


def constraint_of(options: dict[str, Any]) -> dict[str, Any] | None:
    """The protocol's ``constraint``; ``None`` if no option asks for one.

    Raises:
        click.UsageError: more than one option, or a file that cannot be used.
    """
    given: dict[str, dict[str, Any]] = {}
    if options["schema"] is not None:
        given["--json-schema"] = {"json_schema": _schema(options["schema"])}
    if options["json_object"]:
        given["--json-object"] = {"json_object": True}
    if options["regex"] is not None:
        given["--regex"] = {"regex": options["regex"]}
    if options["choice"]:
        given["--choice"] = {"choice": [*options["choice"]]}
    if options["grammar"] is not None:
        kind = "lark" if options["grammar"].suffix == LARK_SUFFIX else "gbnf"
        given["--grammar"] = {kind: read_given(options["grammar"], "--grammar")}
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} do not go together: an answer has one constraint")
    if not given:
        if options["after"] is not None:
            raise click.UsageError("--after says where a constraint begins; add --json-schema, --regex or --choice")
        return None
    [constraint] = given.values()
    return constraint if options["after"] is None else {**constraint, "after": options["after"]}


def _schema(given: str) -> dict[str, Any]:
    if given.strip() in ("", "-"):
        raise click.UsageError(f"--json-schema: {given!r} is not a schema; give a file, or the schema inline")
    text = given if given.lstrip().startswith(("{", "[")) else read_given(Path(given), "--json-schema")
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--json-schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise click.UsageError("--json-schema must be a JSON object")
    return schema


def read_given(file: Path, option: str) -> str:
    """The text of a file that an option names.

    Raises:
        click.UsageError: it cannot be read, or is empty.
    """
    try:
        text = read_text(file, pipes=True)
    except OSError as error:
        raise click.UsageError(f"{option}: cannot read {file}: {error.strerror}") from None
    except ValueError:  # it is not UTF-8, or the path has a NUL
        raise click.UsageError(f"{option}: cannot read {str(file)!r}: it is not a file of UTF-8 text") from None
    if not text.strip():
        raise click.UsageError(f"{option}: {file} is empty")
    return text
