"""``uma-trio sessions``: list, describe, fork and close sessions."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from uma_trio.cli import SuggestingGroup

if TYPE_CHECKING:
    from uma_trio.client import SessionInfo


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that can come before or after the name of a subcommand; the one after it wins."""
    function = click.option(
        "--socket", type=click.Path(), help="The daemon's socket.  [default: $UMA_SOCKET, or the one that serve uses]"
    )(function)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a session.")(function)


@click.group(
    "sessions",
    cls=SuggestingGroup,
    invoke_without_command=True,
    short_help="List, describe, fork and close sessions.",
)
@_options
@click.pass_context
def command(context: click.Context, as_json: bool, socket: str | None) -> None:
    """List, describe, fork and close your sessions: conversations that the daemon remembers.

    The first request with a session's name begins the session, and further requests continue it.  A session
    survives restarts of the daemon.  It ends when you close it, or after session_ttl_s without use (30 days by
    default).  Without a subcommand, all sessions are listed.

    \b
      uma-trio ask --session cooking "How do I make pancakes?"
      uma-trio ask --session cooking "And without eggs?"
      uma-trio sessions
      uma-trio sessions fork cooking baking
      uma-trio sessions close cooking
    """
    context.obj = (as_json, socket)
    if context.invoked_subcommand is None:
        _show(_ask(context, "list", socket), as_json)


@command.command("list")
@_options
@click.pass_context
def list_(context: click.Context, as_json: bool, socket: str | None) -> None:
    """List all sessions, the last used first."""
    _show(_ask(context, "list", socket), as_json or context.obj[0])


@command.command()
@click.argument("session_id")
@_options
@click.pass_context
def describe(context: click.Context, session_id: str, as_json: bool, socket: str | None) -> None:
    """Show the details of one session."""
    (session,) = _ask(context, "describe", socket, session_id=session_id)
    if as_json or context.obj[0]:
        _show([session], as_json=True)
        return
    for name, value in (
        ("session", _shown(session.session_id)),
        ("turns", f"{session.turns:,} (answered requests)"),
        ("tokens", f"{session.tokens:,} (the beginning of its next prompt)"),
        ("begun", _when(session.created_at)),
        ("last used", _when(session.used_at)),
        ("state", _state(session)),
    ):
        click.echo(f"{name:<11}{value}")


@command.command()
@click.argument("session_id")
@click.argument("new_id")
@_options
@click.pass_context
def fork(context: click.Context, session_id: str, new_id: str, as_json: bool, socket: str | None) -> None:
    """Copy SESSION_ID to NEW_ID; both continue independently."""
    _show(_ask(context, "fork", socket, session_id=session_id, new_id=new_id), as_json or context.obj[0])


@command.command()
@click.argument("session_id")
@_options
@click.pass_context
def close(context: click.Context, session_id: str, as_json: bool, socket: str | None) -> None:
    """Delete a session: its messages, on disk too, and its KV cache."""
    closed = _ask(context, "close", socket, session_id=session_id)
    if as_json or context.obj[0]:
        _show(closed, as_json=True)
    else:
        click.echo(f"closed {_shown(session_id)}")


def _ask(context: click.Context, action: str, socket: str | None, **fields: Any) -> list[SessionInfo]:
    from uma_trio.cli.running import run
    from uma_trio.client import BrokenProtocol, ClientError, ServerError

    try:
        found: list[SessionInfo] = run(_asked, socket or context.obj[1], action, fields)
        return found
    except ClientError as error:
        missing = isinstance(error, ServerError) and error.code == "E_SESSION_NOT_FOUND"
        hint = "; uma-trio sessions lists yours" if missing else ""
        click.echo(f"uma-trio sessions: {error}{hint}", err=True)
        sys.exit(3 if isinstance(error, BrokenProtocol) else 2)


async def _asked(socket: str | None, action: str, fields: dict[str, Any]) -> list[SessionInfo]:
    from uma_trio.client import open_client

    async with open_client(socket) as client:
        return await client.sessions(action, **fields)


def _show(found: list[SessionInfo], as_json: bool) -> None:
    if as_json:
        import attrs

        for session in found:
            click.echo(json.dumps(attrs.asdict(session), ensure_ascii=False))
        return
    if not found:
        click.echo('no sessions yet; begin one with: uma-trio ask --session NAME "..."')
        return
    from rich.cells import cell_len, set_cell_size

    rows = [("SESSION", "TURNS", "TOKENS", "LAST USED", "STATE")]
    rows += [(_shown(s.session_id), f"{s.turns:,}", f"{s.tokens:,}", _when(s.used_at), _state(s)) for s in found]
    widths = [max(cell_len(row[n]) for row in rows) for n in range(5)]
    for name, turns, tokens, used, state in rows:
        cells = [
            set_cell_size(name, widths[0]),
            turns.rjust(widths[1]),
            tokens.rjust(widths[2]),
            used.ljust(widths[3]),
            state,
        ]
        click.echo("  ".join(cells).rstrip())


def _shown(name: str) -> str:
    """Replace control characters: a client can put anything into a name, such as terminal escapes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _state(session: SessionInfo) -> str:
    if session.busy:
        return "answering"
    return "on disk" if session.durable else "in memory only; see the daemon's log"
