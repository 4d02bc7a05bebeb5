"""``uma-trio controllers``: upload, tag, list, run and delete controllers."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from uma_trio.cli import SuggestingGroup
from uma_trio.cli.client_options import is_verbose, reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.exits import INCOMPLETE, INTERRUPTED, OK, SERVER_ERROR
from uma_trio.cli.stdio import print_table, when
from uma_trio.files import read_bytes

if TYPE_CHECKING:
    from uma_trio.client import Client, ControllerModule, ControllerTag

T = TypeVar("T")

MODULE_ID: Final = re.compile(r"[0-9a-f]{64}")
SCRIPT_SUFFIXES: Final = (".js", ".mjs", ".ts")
SHOWN_ID_CHARACTERS: Final = 12
MAX_PATH_CHARACTERS: Final = 4096
MAX_WASM_BYTES: Final = 128 << 20
"""The largest that ``max_controller_bytes`` may be."""

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("controllers", cls=SuggestingGroup)
def command() -> None:
    """Upload, tag, list, run and delete controllers: Wasm modules that control an answer token by token.

    A controller can allow and forbid tokens, insert text, remove some, fork the answer and let the forks share
    variables.  jsctrl comes with the daemon and runs JavaScript.  docs/AICI-CONTROLLERS.md says how to write programs
    for it, and controllers in C.

    \b
      uma-trio controllers run jsctrl program.js
      uma-trio controllers upload mine.wasm --tag mine
      uma-trio controllers run mine --arg "what the controller gets"
      uma-trio controllers list
      uma-trio controllers rm mine

    Exit codes: 0 success, 2 the daemon refused, or no daemon, 3 protocol error.
    """


@command.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tag", "tags", multiple=True, metavar="NAME", help="Give it this name; repeatable.")
@_json
@socket_option()
def upload(file: Path, tags: tuple[str, ...], as_json: bool, socket: str | None) -> None:
    """Store the controller FILE, a Wasm module, and print its id.

    The id is the SHA-256 of the file, so a file that was uploaded before keeps its id.

    \b
      uma-trio controllers upload mine.wasm --tag mine
    """
    try:
        wasm = read_bytes(file, MAX_WASM_BYTES, pipes=True)
    except OSError as error:
        raise click.UsageError(f"cannot read {file}: {error.strerror}") from None
    if file.suffix in SCRIPT_SUFFIXES and not wasm.startswith(b"\0asm"):
        raise click.UsageError(
            f"{file} is not Wasm. A JavaScript program is run with: uma-trio controllers run jsctrl {file}"
        )

    async def do(client: Client) -> dict[str, Any]:
        stored = await client.upload_controller(wasm, keep_alive=True)
        assert stored.module_id is not None
        if tags:
            await client.tag_controller(stored.module_id, tags, keep_alive=True)
        return {
            "module_id": stored.module_id,
            "wasm_size": stored.wasm_size,
            "compiled_size": stored.compiled_size,
            "time_ms": stored.time_ms,
            "tags": [*tags],
        }

    stored = _run(socket, do)
    click.echo(json.dumps(stored) if as_json else stored["module_id"])
    if not as_json:
        sizes = f"{_kib(stored['wasm_size'])}, {_kib(stored['compiled_size'])} of machine code"
        click.echo(f"{file.name}: {sizes}, compiled in {stored['time_ms']:.0f} ms", err=True)


@command.command()
@click.argument("controller")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@_json
@socket_option()
def tag(controller: str, names: tuple[str, ...], as_json: bool, socket: str | None) -> None:
    """Give CONTROLLER, a module id or a tag, further names.  A name that another module has moves to this one.

    The names of the user who runs the daemon are for everybody; those of another user are for that user alone.

    \b
      uma-trio controllers tag mine-2 mine
    """

    async def do(client: Client) -> list[ControllerTag]:
        module_id = controller
        if not MODULE_ID.fullmatch(controller):
            tags = await client.controller_tags(keep_alive=True)
            module_ids = {listed.module_id for listed in tags if listed.tag == controller}
            if not module_ids:
                there = ", ".join(sorted(listed.tag for listed in tags)) or "none"
                raise click.UsageError(f"no controller has the tag {controller}; tags are: {there}")
            module_id = module_ids.pop()
        return await client.tag_controller(module_id, names)

    _print(_run(socket, do), as_json)


@command.command("list")
@click.option("--modules", is_flag=True, help="List modules with their owners, also those without a tag.")
@_json
@socket_option()
def list_(modules: bool, as_json: bool, socket: str | None) -> None:
    """List the tags of the controllers that you can run.  The most recently changed one comes first.

    With --modules: the modules that you have uploaded; the user who runs the daemon sees those of everybody.
    """
    if modules:
        _print_modules(_run(socket, lambda client: client.controller_modules()), as_json)
    else:
        _print(_run(socket, lambda client: client.controller_tags()), as_json)


@command.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "--owner",
    help="Delete what this owner has, a name that list --modules shows. Only for the user who runs the daemon.",
)
@_json
@socket_option()
def rm(names: tuple[str, ...], owner: str | None, as_json: bool, socket: str | None) -> None:
    """Delete each NAME, a tag or a module id.  A module goes with its tags.  Controllers that run go on.

    \b
      uma-trio controllers rm mine
      uma-trio controllers rm 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    """

    async def do(client: Client) -> list[str]:
        deleted = []
        tags = [name for name in names if not MODULE_ID.fullmatch(name)]
        if tags:
            deleted += await client.delete_controller(tags=tags, keep_alive=True, owner=owner)
        for name in dict.fromkeys(names):
            if MODULE_ID.fullmatch(name):
                deleted += await client.delete_controller(name, keep_alive=True, owner=owner)
        return deleted

    for name in _run(socket, do):
        click.echo(json.dumps({"deleted": name}) if as_json else f"deleted {name}")


@command.command()
@click.argument("controller")
@click.argument(
    "files", metavar="[FILE]...", nargs=-1, type=click.Path(dir_okay=False, allow_dash=True, path_type=Path)
)
@click.option("--arg", help="The argument of the controller: a text.")
@click.option("--arg-json", help="The argument of the controller: a JSON value.")
@click.option("--model", help="Name of the model that answers.  [default: the daemon's first]")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum number of tokens of each answer.")
@click.option("--temp", "temperature", type=click.FloatRange(0, 100), help="Temperature.  [default: 0, greedy]")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling.")
@click.option("--top-k", type=click.IntRange(0), help="Sample from the k most likely tokens; 0 is off.")
@click.option("--seed", type=click.IntRange(0), help="The same seed gives the same answer.")
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON lines.")
@click.option("--stats", is_flag=True, help="Print on stderr how many tokens each answer has.")
@socket_option(verbose="Print on stderr what the controllers print, and which daemon answers.")
def run(
    controller: str, files: tuple[Path, ...], as_json: bool, stats: bool, socket: str | None, **options: Any
) -> None:
    """Run CONTROLLER, a module id or a tag, and stream its text.  FILE is its argument, such as a program; - is stdin.

    Of several files, jsctrl runs the first one, which can import the others by their paths.

    The text of one answer comes as it is generated.  An arrow means: the controller removed some text before
    it.  An answer that forks is printed at the end, as a tree.

    \b
      uma-trio controllers run jsctrl program.js
      uma-trio controllers run jsctrl program.js -v
      uma-trio controllers run jsctrl main.js lib.js
      uma-trio controllers run yesno --arg "Is 7 greater than 3?"
      uma-trio controllers run jsctrl program.js --json | jq -r "select(.event == \\"fork\\")"

    \b
    Exit codes:
        0  all answers are complete, or were cut by a limit: then a notice says so
        2  wrong usage, no daemon, the daemon refused, or all answers failed
        3  the other side does not speak the protocol
        4  some answers failed, or waited for ever
      130  interrupted
    """
    from uma_trio.cli.run_trio import run as run_trio

    argument = _argument(files, options.pop("arg"), options.pop("arg_json"))
    fields = {name: value for name, value in options.items() if value is not None}
    request = {"temperature": 0.0, "controller": controller, **argument, **fields}
    code = SERVER_ERROR
    with reporting_errors("controllers", socket):
        code = run_trio(stream, request, socket, as_json, stats)
    sys.exit(code)


async def stream(
    request: dict[str, Any], socket: str | None, as_json: bool, stats: bool, wait_s: float | None = None
) -> int:
    """Send a request with a controller, print its answers, and return the exit code."""
    from uma_trio.cli.answer import print_json, print_stats
    from uma_trio.cli.generation import generate, new_id
    from uma_trio.cli.run_view import RunPrinter
    from uma_trio.client import Event

    printer = RunPrinter(show_logs=is_verbose())

    def show(event: Event) -> None:
        if as_json:
            printer.tree.add(event)
            print_json(event)
        else:
            printer.print(event)

    await say_which_daemon("controllers", socket, wait_s)
    await _say_if_runtime_starts(socket, wait_s)
    try:
        eos = await generate(
            {"id": new_id("run"), **request}, show, socket, signals=(signal.SIGINT, signal.SIGTERM), wait_s=wait_s
        )
    finally:
        if not as_json:
            printer.end()
        if stats:
            for answer in printer.tree:
                if answer.eos is not None:
                    click.echo(f"[{answer.index}] ", err=True, nl=False)
                    print_stats(answer.eos)
    if eos is None or eos.reason == "cancelled":
        click.echo("cancelled", err=True)
        return INTERRUPTED
    failed = any(answer.eos is None or answer.eos.reason == "deadlock" for answer in printer.tree)
    return INCOMPLETE if failed else OK


async def _say_if_runtime_starts(socket: str | None, wait_s: float | None) -> None:
    """On a terminal, or with ``--verbose``: say on stderr that the first controller waits for its runtime."""
    if not sys.stderr.isatty() and not is_verbose():
        return
    from uma_trio.cli.generation import asked

    controllers = (await asked(socket, lambda client: client.metrics(), wait_s=wait_s)).get("controllers")
    if controllers is not None and controllers.get("pid") is None:
        text = "the runtime of controllers starts now, which takes some seconds the first time"
        click.secho(text, err=True, dim=True)


def note_if_file(text: str, note: str) -> None:
    """Print a note on stderr if a text for a controller is the name of a file, which was probably meant."""
    if len(text) < MAX_PATH_CHARACTERS and "\0" not in text and os.path.isfile(text):
        click.echo(f"note: {note}", err=True)


def _argument(files: Sequence[Path], text: str | None, as_json: str | None) -> dict[str, Any]:
    """The request's ``controller_arg``; no field if nothing is given."""
    if sum((bool(files), text is not None, as_json is not None)) > 1:
        raise click.UsageError("give one of FILE, --arg and --arg-json")
    if text is not None:
        note_if_file(text, f"--arg is the text itself. For what is in {text}, leave --arg out.")
        return {"controller_arg": text}
    if as_json is not None:
        try:
            return {"controller_arg": json.loads(as_json)}
        except ValueError as error:
            raise click.UsageError(f"--arg-json is not JSON: {error}") from None
    if not files:
        return {}
    if len(files) == 1:
        return {"controller_arg": _text_of(files[0])}
    folder = files[0].parent
    by_path = {Path(os.path.relpath(file, folder)).as_posix(): _text_of(file) for file in files}
    return {"controller_arg": by_path}


def _text_of(file: Path) -> str:
    from uma_trio.protocol.controllers import MAX_ARG_BYTES

    try:
        is_stdin = str(file) == "-"
        data = sys.stdin.buffer.read(MAX_ARG_BYTES + 1) if is_stdin else read_bytes(file, MAX_ARG_BYTES + 1, pipes=True)
    except FileNotFoundError:
        raise click.UsageError(f"there is no file {file}; give a text with --arg") from None
    except OSError as error:
        raise click.UsageError(f"cannot read {file}: {error.strerror}") from None
    if len(data) > MAX_ARG_BYTES:
        raise click.UsageError(f"{file} has more than {MAX_ARG_BYTES} bytes, the most that a controller gets")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise click.UsageError(f"{file} is not text in UTF-8") from None


def _run(socket: str | None, do: Callable[[Client], Awaitable[T]]) -> T:
    """Ask the daemon, on one connection."""
    from uma_trio.cli.generation import asked
    from uma_trio.cli.run_trio import run as run_trio

    with reporting_errors("controllers", socket):
        run_trio(say_which_daemon, "controllers", socket)
        result: T = run_trio(asked, socket, do)
    return result


def _print(tags: Sequence[ControllerTag], as_json: bool) -> None:
    if as_json:
        import attrs

        for controller_tag in tags:
            click.echo(json.dumps(attrs.asdict(controller_tag)))
        return
    if not tags:
        click.echo("no controllers yet; store one with: uma-trio controllers upload FILE --tag NAME")
        return
    rows = [("TAG", "MODULE", "SIZE", "SET", "BY")]
    rows += [
        (
            controller_tag.tag,
            controller_tag.module_id[:SHOWN_ID_CHARACTERS],
            _kib(controller_tag.wasm_size),
            when(controller_tag.updated_at) if controller_tag.updated_at else "-",
            controller_tag.updated_by,
        )
        for controller_tag in tags
    ]
    print_table(rows)


def _print_modules(modules: Sequence[ControllerModule], as_json: bool) -> None:
    if as_json:
        import attrs

        for module in modules:
            click.echo(json.dumps(attrs.asdict(module)))
        return
    if not modules:
        click.echo("no modules are stored; store one with: uma-trio controllers upload FILE --tag NAME")
        return
    rows = [("MODULE", "OWNER", "SIZE", "CODE", "USED", "TAGS")]
    rows += [
        (
            *(
                module.module_id,
                module.owner,
                _kib(module.wasm_size),
                _kib(module.compiled_size),
                when(module.used_at) if module.used_at else "-",
            ),
            ", ".join(module.tags),
        )
        for module in modules
    ]
    print_table(rows)


def _kib(size: int) -> str:
    return f"{-(-size // 1024):,} KiB"
