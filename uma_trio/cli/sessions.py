"""``uma-trio sessions``: what the daemon remembers."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from typing import Any

import click


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """Those that may stand before and behind the name of a subcommand; the one behind counts."""
    function = click.option("--socket", type=click.Path(), help="The daemon's socket.")(function)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a session.")(function)


@click.group(
    "sessions", invoke_without_command=True, short_help="List, describe, fork and close what the daemon remembers."
)
@_options
@click.pass_context
def command(context: click.Context, as_json: bool, socket: str | None) -> None:
    """List, describe, fork and close your sessions: conversations that the daemon remembers.

    A session begins with its first request and goes on with each further one of the same name.  It survives
    the daemon and its connections, until it is closed or was not used for session_ttl_s (30 days, unless
    the daemon was started with another --session-ttl-s).  Without a command all are listed.

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
    """All of them, the last used first."""
    _show(_ask(context, "list", socket), as_json or context.obj[0])


@command.command()
@click.argument("session_id")
@_options
@click.pass_context
def describe(context: click.Context, session_id: str, as_json: bool, socket: str | None) -> None:
    """All that is known of one."""
    (session,) = _ask(context, "describe", socket, session_id=session_id)
    if as_json or context.obj[0]:
        _show([session], as_json=True)
        return
    for name, value in (
        ("session", _shown(session["session_id"])),
        ("turns", f"{session['turns']:,} (requests that were answered)"),
        ("tokens", f"{session['tokens']:,} (what its next prompt begins with)"),
        ("begun", _when(session["created_at"])),
        ("last used", _when(session["used_at"])),
        ("state", _state(session)),
    ):
        click.echo(f"{name:<11}{value}")


@command.command()
@click.argument("session_id")
@click.argument("new_id")
@_options
@click.pass_context
def fork(context: click.Context, session_id: str, new_id: str, as_json: bool, socket: str | None) -> None:
    """Begin NEW_ID where SESSION_ID is now; both go on by themselves."""
    _show(_ask(context, "fork", socket, session_id=session_id, new_id=new_id), as_json or context.obj[0])


@command.command()
@click.argument("session_id")
@_options
@click.pass_context
def close(context: click.Context, session_id: str, as_json: bool, socket: str | None) -> None:
    """Forget one: what was said, on disk too, and all that was computed of it."""
    closed = _ask(context, "close", socket, session_id=session_id)
    if as_json or context.obj[0]:
        _show(closed, as_json=True)
    else:
        click.echo(f"closed {_shown(session_id)}")


def _ask(context: click.Context, action: str, socket: str | None, **fields: Any) -> list[dict[str, Any]]:
    from uma_trio.cli.running import run
    from uma_trio.client import BrokenProtocol, ClientError, ServerError

    try:
        found: list[dict[str, Any]] = run(_asked, socket or context.obj[1], action, fields)
        return found
    except ClientError as error:
        missing = isinstance(error, ServerError) and error.code == "E_SESSION_NOT_FOUND"
        hint = "; uma-trio sessions lists yours" if missing else ""
        click.echo(f"uma-trio sessions: {error}{hint}", err=True)
        sys.exit(3 if isinstance(error, BrokenProtocol) else 2)


async def _asked(socket: str | None, action: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    from uma_trio.client import open_client

    async with open_client(socket) as client:
        return await client.sessions(action, **fields)


def _show(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for session in found:
            click.echo(json.dumps(session, ensure_ascii=False))
        return
    if not found:
        click.echo('no sessions yet; begin one with: uma-trio ask --session NAME "..."')
        return
    from rich.cells import cell_len, set_cell_size

    rows = [("SESSION", "TURNS", "TOKENS", "LAST USED", "STATE")]
    rows += [
        (_shown(s["session_id"]), f"{s['turns']:,}", f"{s['tokens']:,}", _when(s["used_at"]), _state(s)) for s in found
    ]
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
    """A name is whatever the client chose: nothing of it moves the cursor."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _state(session: dict[str, Any]) -> str:
    if session["busy"]:
        return "answering"
    return "on disk" if session["durable"] else "in memory only: the daemon's log says why"
