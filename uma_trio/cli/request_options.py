"""The options of the commands that send a request for text, and the fields of the request that they stand for."""

from __future__ import annotations

import functools
import json
import math
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from uma_trio.cli.completion import any_file, model_name, session_name
from uma_trio.files import read_text
from uma_trio.protocol.parameters import MAX_INT32, ROWS, Field

Command = TypeVar("Command", bound=Callable[..., Any])

FIELDS: Final = (*(row.name for row in ROWS), "logit_bias", "model")
"""Options that become fields of the request by the same name, if they are given."""

LARK_SUFFIX: Final = ".lark"
TOOL_CHOICES: Final = ("auto", "none", "required")


def fields_of(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that ``options`` set.

    Raises:
        click.UsageError: as ``constraint_of``.
    """
    given = {name: options.get(name) for name in FIELDS}
    fields = {name: value for name, value in given.items() if value is not None and value != ()}
    if (constraint := constraint_of(options)) is not None:
        fields["constraint"] = constraint
    if options["adapter"]:
        fields["adapters"] = [_adapter(adapter) for adapter in options["adapter"]]
    if options["priority"]:
        fields["slo"] = {"priority": options["priority"]}
    return fields


def request_options(command: Command) -> Command:
    """Add the options that every command has that sends requests for text."""
    return _MODEL(options_but_model(command))


def options_but_model(command: Command) -> Command:
    """Add them without ``--model``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def not_empty(_: click.Context, __: click.Parameter, given: Any) -> Any:
    """Refuse empty text, in an option that is given once or several times."""
    if given == "" or (isinstance(given, tuple) and "" in given):
        raise click.BadParameter("the text is empty; leave the option out, or give some text")
    return given


def _biases(given: tuple[str, ...]) -> dict[str, float] | None:
    """Parse ``ID=BIAS`` into the protocol's map.  The daemon checks the bounds."""
    biases = {}
    for pair in given:
        token, _, bias = pair.partition("=")
        try:
            biases[str(int(token))] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{pair!r} is not ID=BIAS, such as 612=-100") from None
        if not math.isfinite(biases[str(int(token))]):
            raise click.BadParameter(f"{pair!r}: a bias must be a finite number")
    return biases or None


def _adapter(given: str) -> dict[str, Any]:
    """Parse ``NAME`` or ``NAME=SCALE``.  The daemon checks the bounds."""
    name, separator, scale = given.partition("=")
    try:
        number = float(scale) if separator else 1.0
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number):
        raise click.BadParameter(f"--adapter: {given!r} is not NAME or NAME=SCALE, such as sql=0.5")
    return {"name": name, "scale": number} if separator else {"name": name}


def _option(row: Field) -> Callable[[Command], Command]:
    """The option of a field."""
    named = functools.partial(click.option, *row.flags, row.name, default=None)
    if row.type is bool:
        return named(is_flag=True, help=row.plain_help)
    if row.is_list:
        named = functools.partial(named, multiple=True)
    help = f"{row.plain_help}  Repeatable." if row.is_list else row.plain_help
    if row.type is str:
        return named(callback=not_empty, help=help)
    if row.type not in (int, float):
        return named(type=click.Choice(typing.get_args(row.type)), help=help)
    range_type: Any = click.IntRange if row.type is int else click.FloatRange
    lowest, highest = row.bounds.get("ge", row.bounds.get("gt")), row.bounds["le"]
    allowed = range_type(lowest, None if highest >= MAX_INT32 else highest, min_open="gt" in row.bounds)
    return named(type=allowed, metavar="N" if row.type is int else "X", help=help)


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


def tool_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that offer tools; empty if no option does.

    Raises:
        click.UsageError: the file cannot be used.
    """
    choice = options["tool_choice"]
    if options["tools"] is None:
        if choice is not None:
            raise click.UsageError("--tool-choice chooses among tools; add --tools FILE")
        return {}
    fields: dict[str, Any] = {"tools": _tools(options["tools"])}
    if choice is not None:
        fields["tool_choice"] = choice if choice in TOOL_CHOICES else {"name": choice}
    return fields


def _tools(file: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(read_given(file, "--tools"))
    except ValueError as error:
        raise click.UsageError(f"--tools: {file} is not valid JSON: {error}") from None
    tools = content.get("tools") if isinstance(content, dict) else content
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise click.UsageError(
            f'--tools: {file} must be a list of tools, each {{"name": ..., "description": ..., "parameters": ...}}'
        )
    return [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]


_OPTIONS: Final = (
    click.option(
        "--adapter",
        multiple=True,
        metavar="NAME[=SCALE]",
        help="Answer with this LoRA adapter of the model; repeatable. See serve --adapter.",
    ),
    click.option("--system", help="System message before the question."),
    *(_option(row) for row in ROWS if row.flags),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=BIAS",
        callback=lambda _, __, given: _biases(given),
        help="Number added to a token's logit, from -100 (never) to 100; repeatable.",
    ),
    click.option(
        "--json-schema",
        "schema",
        metavar="FILE",
        shell_complete=any_file,
        help="The answer is JSON that this schema describes: a file, or the schema inline.",
    ),
    click.option("--json-object", is_flag=True, help="The answer is a JSON object."),
    click.option("--regex", callback=not_empty, help="The answer is a match of this regular expression."),
    click.option("--choice", multiple=True, help="The answer is this text, or one of several; repeatable."),
    click.option(
        "--grammar",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help=f"The answer follows this grammar: GBNF, or Lark if the file ends with {LARK_SUFFIX}.",
    ),
    click.option(
        "--after",
        metavar="TEXT",
        help="The constraint applies after this text in the answer, such as </think>.",
    ),
    click.option("--priority", type=click.Choice(["interactive", "normal", "background"]), help="Scheduling class."),
    click.option(
        "--session",
        shell_complete=session_name,
        callback=not_empty,
        help="Continue or begin this session. See uma-trio sessions.",
    ),
    click.option(
        "--show-reasoning/--hide-reasoning",
        "show_reasoning",
        default=None,
        help="Print the model's reasoning on stderr, in front of the answer.  [default: on a terminal]",
    ),
)
_MODEL: Final = click.option(
    "--model",
    shell_complete=model_name,
    help="Name of the model that answers. One that is installed and not loaded is loaded.  [default: the daemon's first]",
)
