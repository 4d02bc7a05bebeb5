"""``uma-trio sessions``: list, show, export, fork and close sessions."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from uma_trio.cli import SuggestingGroup
from uma_trio.cli.answer import call_line
from uma_trio.cli.client_options import reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.completion import model_name, session_name
from uma_trio.cli.exits import SERVER_ERROR
from uma_trio.cli.listed import all_option, chosen_names
from uma_trio.cli.stdio import fail, print_table, when

if TYPE_CHECKING:
    from uma_trio.client import Client, SessionInfo, Transcript

T = TypeVar("T")

MARKDOWN: Final = (".md", ".markdown")


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that can come before or after the name of a subcommand; the one after it wins."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a session.")(
        _model_option(socket_option()(function))
    )


_model_option = click.option(
    "--model",
    shell_complete=model_name,
    help="Name of the model whose sessions these are.  [default: the daemon's first model; for list and close --all, "
    "all that are loaded]",
)


@click.group(
    "sessions",
    cls=SuggestingGroup,
    invoke_without_command=True,
)
@_options
@all_option
@click.pass_context
def command(context: click.Context, as_json: bool, shows_all: bool, model: str | None, socket: str | None) -> None:
    """List, show, export, fork and close your sessions: conversations that the daemon remembers.

    The first request with a session's name begins the session, and further requests continue it.  A session
    survives restarts of the daemon.  It ends when you close it, or after session_ttl_s without use (30 days by
    default).  Without a subcommand, sessions are listed.  Each model of the daemon has sessions of its own.

    \b
      uma-trio ask --session trip "What is the capital of France?"
      uma-trio ask --session trip "And of Italy?"
      uma-trio sessions
      uma-trio sessions show trip
      uma-trio sessions show --model embedded trip
      uma-trio sessions export trip trip.md
      uma-trio sessions fork trip holiday
      uma-trio sessions close trip holiday

    Exit codes: 0 success, 2 the daemon refused, or no daemon, 3 protocol error.
    """
    context.obj = (as_json, socket, model)
    if context.invoked_subcommand is None:
        _list(context, as_json, model, socket, shows_all=shows_all)
    elif shows_all:
        raise click.UsageError("--all comes after the subcommand: uma-trio sessions list --all")


@command.command("list")
@_options
@all_option
@click.pass_context
def list_(context: click.Context, as_json: bool, shows_all: bool, model: str | None, socket: str | None) -> None:
    """List sessions, the most recently used first."""
    _list(context, as_json or context.obj[0], model, socket, shows_all=shows_all)


@command.command(short_help="Show how long and how old a session is.")
@click.argument("session_id", metavar="NAME", shell_complete=session_name)
@_options
@click.pass_context
def describe(context: click.Context, session_id: str, as_json: bool, model: str | None, socket: str | None) -> None:
    """Show how long a session is, when it was used, and whether it is on disk."""
    model = model or context.obj[2]
    (session,) = _run(
        context,
        socket,
        lambda client: client.sessions("describe", session_id=session_id, model=model),
        session_id,
        model,
    )
    if as_json or context.obj[0]:
        _print([session], as_json=True)
        return
    for name, value in (
        ("session", _without_controls(session.session_id)),
        ("turns", f"{session.turns:,} (answered requests)"),
        ("tokens", f"{session.tokens:,} (the beginning of its next prompt)"),
        ("begun", when(session.created_at)),
        ("last used", when(session.used_at)),
        ("state", _state(session)),
    ):
        click.echo(f"{name:<11}{value}")


@command.command(short_help="Show the messages of a session.")
@click.argument("session_id", metavar="NAME", shell_complete=session_name)
@_options
@click.pass_context
def show(context: click.Context, session_id: str, as_json: bool, model: str | None, socket: str | None) -> None:
    """Show what a session contains: the messages of a chat, or the text of plain prompts and their answers.

    \b
      uma-trio sessions show trip
      uma-trio sessions show trip --json | jq -r ".messages[-1].content"
    """
    model = model or context.obj[2]
    transcript = _run(context, socket, lambda client: client.transcript(session_id, model=model), session_id, model)
    session = transcript.session
    if as_json or context.obj[0]:
        import attrs

        click.echo(_json({"session": attrs.asdict(session), **_content(transcript)}))
        return
    click.secho(
        f"{_without_controls(session.session_id)}: {session.turns:,} turns, {session.tokens:,} tokens, begun "
        f"{when(session.created_at)}, last used {when(session.used_at)}",
        bold=True,
    )
    for message in transcript.messages:
        click.secho(f"\n{message.role}", bold=True)
        if message.reasoning is not None:
            click.secho(_without_controls(message.reasoning, keep="\n\t") + "\n", dim=True)
        if message.text or not message.tool_calls:
            click.echo(_without_controls(message.text, keep="\n\t"))
        for call in message.tool_calls or ():
            click.echo(_without_controls(call_line(call)))
    if transcript.text is not None:
        click.echo("\n" + _without_controls(transcript.text, keep="\n\t"))


@command.command(short_help="Write the messages of a session to a file.")
@click.argument("session_id", metavar="NAME", shell_complete=session_name)
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@_model_option
@socket_option()
@click.pass_context
def export(context: click.Context, session_id: str, file: Path | None, model: str | None, socket: str | None) -> None:
    """Write the messages of a session to FILE: as Markdown if it ends in .md, otherwise as JSON (.json).

    JSON has the shape that a request takes: {"messages": [{"role": ..., "content": ...}]}.  For a session of plain
    prompts it is {"prompt": ...}.  Without FILE, JSON goes to stdout.  An existing FILE is replaced.

    \b
      uma-trio sessions export trip trip.md
      uma-trio sessions export trip > trip.json
    """
    from uma_trio.cli.conversation import as_fields, as_markdown
    from uma_trio.files import replace_text

    if file is not None and file.suffix.lower() not in (".json", *MARKDOWN):
        raise click.UsageError(f"{file.name} must end in .json or .md, which says the format")
    model = model or context.obj[2]
    transcript = _run(context, socket, lambda client: client.transcript(session_id, model=model), session_id, model)
    if file is None or file.suffix.lower() not in MARKDOWN:
        content = _content(transcript)
        text = json.dumps({"prompt": content["text"]} if "text" in content else content, ensure_ascii=False, indent=2)
    else:
        page = (
            transcript.text
            if transcript.text is not None
            else as_markdown([as_fields(message) for message in transcript.messages])
        )
        text = f"# {_without_controls(session_id)}\n\n" + page.removesuffix("\n")
    if file is None:
        click.echo(text)
        return
    try:
        replace_text(file, text + "\n")
    except OSError as error:
        fail("sessions", f"cannot write {file}: {error.strerror}", SERVER_ERROR)


@command.command(short_help="Copy a session; both continue independently.")
@click.argument("session_id", metavar="NAME", shell_complete=session_name)
@click.argument("new_id", metavar="NEW_NAME")
@_options
@click.pass_context
def fork(
    context: click.Context, session_id: str, new_id: str, as_json: bool, model: str | None, socket: str | None
) -> None:
    """Copy the session NAME to NEW_NAME; both continue independently."""
    fields = {"session_id": session_id, "new_id": new_id, "model": model or context.obj[2]}
    forked = _run(context, socket, lambda client: client.sessions("fork", **fields), session_id, fields["model"])
    _print(forked, as_json or context.obj[0])


@command.command(short_help="Delete sessions, also from the disk.")
@click.argument("session_ids", metavar="NAME...", nargs=-1, shell_complete=session_name)
@click.option("--all", "close_all", is_flag=True, help="Close all your sessions, after a question.")
@click.option("--yes", is_flag=True, help="With --all: do not ask.")
@_options
@click.pass_context
def close(
    context: click.Context,
    session_ids: Sequence[str],
    close_all: bool,
    yes: bool,
    as_json: bool,
    model: str | None,
    socket: str | None,
) -> None:
    """Delete sessions: their messages, on disk too, and their KV cache.

    A session that cannot be closed does not keep the others from being closed.

    \b
      uma-trio sessions close trip
      uma-trio sessions close --all --yes
    """
    if close_all == bool(session_ids):
        raise click.UsageError("give the names of sessions, or --all")
    model = model or context.obj[2]
    to_close = [(name, model) for name in session_ids]
    if close_all:
        by_model = _run(context, socket, lambda client: _by_model(client, model))
        to_close = [(session.session_id, name) for name, sessions in by_model.items() for session in sessions]
        if to_close and not yes:
            _confirm(f"Close {len(to_close):,} sessions? Their messages are deleted.")
    json_wanted = as_json or context.obj[0]
    failures: list[str] = []

    async def close_each(client: Client) -> None:
        from uma_trio.client import ServerError

        for name, of_model in to_close:
            try:
                closed = await client.sessions("close", session_id=name, model=of_model, keep_alive=True)
            except ServerError as error:
                failures.append(f"{error}{await _similar(client, name, of_model)}")
                continue
            if json_wanted:
                _print(closed, as_json=True)
            else:
                click.echo(f"closed {_without_controls(name)}")

    if to_close:
        _run(context, socket, close_each)
    elif not json_wanted:
        click.echo("no sessions to close")
    for failure in failures[:-1]:
        click.echo(f"uma-trio sessions: {failure}", err=True)
    if failures:
        fail("sessions", failures[-1], SERVER_ERROR)


def _confirm(question: str) -> None:
    try:
        click.confirm(question, abort=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError("nobody confirmed; to close all sessions without a question, add --yes") from None


def _list(context: click.Context, as_json: bool, model: str | None, socket: str | None, *, shows_all: bool) -> None:
    by_model = _run(context, socket, lambda client: _by_model(client, model or context.obj[2]))
    if as_json:
        for name, sessions in by_model.items():
            _print(sessions, as_json=True, model=name)
        return
    listed = [(name, session) for name, sessions in by_model.items() for session in sessions]
    if not listed:
        click.echo('no sessions yet; begin one with: uma-trio ask --session NAME "..."')
    elif shown := chosen_names(listed, lambda pair: pair[1].session_id, shows_all=shows_all):
        _print_table(shown, n_models=len(by_model))


async def _by_model(client: Client, model: str | None) -> dict[str, list[SessionInfo]]:
    """The sessions of a model, or of all that are loaded; a list would load the others.  The default model is first."""
    names = [model]
    if model is None:
        models = await client.models(keep_alive=True)
        loaded = [listed.name for listed in models if listed.state == "ready"]
        names = [*loaded]
        others = [listed.name for listed in models if listed.name not in loaded]
        if others:
            shown = ", ".join(others[:3]) + (" and others" if len(others) > 3 else "")
            click.echo(f"without sessions of models that are not loaded: {shown}", err=True)
    return {name: await client.sessions(model=name, keep_alive=True) for name in names if name is not None}


async def models_with_session(client: Client, session_id: str, besides: str | None) -> list[str]:
    """The loaded models that have a session of this name.

    Args:
        besides: a name of the model that is left out; ``None`` for the daemon's first.
    """
    from uma_trio.client import ServerError

    models = await client.models(keep_alive=True)
    names = []
    for number, model in enumerate(models):
        is_left_out = number == 0 if besides is None else model.is_called(besides)
        if is_left_out or model.state != "ready":
            continue
        try:
            await client.sessions("describe", session_id=session_id, model=model.name, keep_alive=True)
        except ServerError as error:
            if error.code != "E_SESSION_NOT_FOUND":
                raise
        else:
            names.append(model.name)
    return names


def _run(
    context: click.Context,
    socket: str | None,
    work: Callable[[Client], Awaitable[T]],
    name: str | None = None,
    model: str | None = None,
) -> T:
    """Connect to the daemon and run ``work``.  Its errors end the program.

    Args:
        name: the session that ``work`` is about; if it does not exist, the error names similar ones.
        model: whose session it is; ``None`` for the daemon's first.
    """
    from uma_trio.cli.generation import asked
    from uma_trio.cli.run_trio import run
    from uma_trio.client import ServerError

    path = socket or context.obj[1]
    at_once = partial(asked, path, wait_s=0)
    with reporting_errors("sessions", path):
        run(say_which_daemon, "sessions", path)
        try:
            result: T = run(at_once, work)
            return result
        except ServerError as error:
            if error.code == "E_SESSION_NOT_FOUND" and (
                hint := run(at_once, lambda client: _similar(client, name, model))
            ):
                fail("sessions", f"{error}{hint}", SERVER_ERROR)
            raise


async def _similar(client: Client, name: str | None, model: str | None) -> str:
    """The end of an error: which models have a session ``name``, or which sessions have a name like it; or nothing."""
    import difflib

    names = [session.session_id for session in await client.sessions(model=model, keep_alive=True)]
    if name is None or name in names:
        return ""
    others = await models_with_session(client, name, model)
    if others:
        return f"; there is one of the model {' and of '.join(others)}: add --model {others[0]}"
    similar = [repr(near) for near in difflib.get_close_matches(name, names, cutoff=0.7)]
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def _content(transcript: Transcript) -> dict[str, Any]:
    """The content of a session as JSON: ``messages``, or ``text``."""
    if transcript.text is not None:
        return {"text": transcript.text}
    from uma_trio.cli.conversation import as_fields

    return {"messages": [as_fields(message) for message in transcript.messages]}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _print(sessions: list[SessionInfo], as_json: bool, model: str | None = None) -> None:
    """Print sessions of one model, with its name in JSON if it is given."""
    if as_json:
        import attrs

        for session in sessions:
            named = {} if model is None else {"model": model}
            click.echo(_json({**attrs.asdict(session), **named}))
        return
    _print_table([(None, session) for session in sessions], n_models=1)


def _print_table(sessions: Sequence[tuple[str | None, SessionInfo]], *, n_models: int) -> None:
    """Print sessions with the names of their models, which are shown if there are several."""
    rows = [("SESSION", "MODEL", "TURNS", "TOKENS", "LAST USED", "STATE")]
    rows += [
        (_without_controls(s.session_id), model or "", f"{s.turns:,}", f"{s.tokens:,}", when(s.used_at), _state(s))
        for model, s in sessions
    ]
    if n_models > 1:
        print_table(rows, right=(2, 3))
    else:
        print_table([(name, *rest) for name, _, *rest in rows], right=(1, 2))


def _without_controls(text: str, keep: str = "") -> str:
    """Replace control characters except ``keep``: a client can put anything into a text, such as terminal escapes."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


def _state(session: SessionInfo) -> str:
    if session.busy:
        return "answering"
    return "on disk" if session.durable else "in memory only; see the daemon's log"
