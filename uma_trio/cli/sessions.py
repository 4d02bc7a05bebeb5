"""``uma-trio sessions``: what the daemon remembers."""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

import click


@click.group("sessions", invoke_without_command=True, short_help="List, describe, fork and close what the daemon remembers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a session.")
@click.option("--socket", type=click.Path(), help="The daemon's socket.")
@click.pass_context
def command(context: click.Context, as_json: bool, socket: str | None) -> None:
    """List, describe, fork and close your sessions: conversations that the daemon remembers.

    A session begins with its first request and goes on with each further one of the same name.  It survives
    the daemon, until it is closed or was not used for session_ttl_s.

    \b
      uma-trio ask --session cooking "How do I make pancakes?"
      uma-trio ask --session cooking "And without eggs?"
      uma-trio sessions
      uma-trio sessions fork cooking baking
      uma-trio sessions close cooking
    """
    context.obj = (as_json, socket)
    if context.invoked_subcommand is None:
        _show(context, "list")


@command.command("list")
@click.pass_context
def list_(context: click.Context) -> None:
    """All of them, the last used first."""
    _show(context, "list")


@command.command()
@click.argument("session_id")
@click.pass_context
def describe(context: click.Context, session_id: str) -> None:
    """One of them."""
    _show(context, "describe", session_id=session_id)


@command.command()
@click.argument("session_id")
@click.argument("new_id")
@click.pass_context
def fork(context: click.Context, session_id: str, new_id: str) -> None:
    """Begin NEW_ID where SESSION_ID is now; both go on by themselves."""
    _show(context, "fork", session_id=session_id, new_id=new_id)


@command.command()
@click.argument("session_id")
@click.pass_context
def close(context: click.Context, session_id: str) -> None:
    """Forget one: what was said, and all that was computed of it."""
    _ask(context, "close", session_id=session_id)
    click.echo(f"closed {session_id}")


def _ask(context: click.Context, action: str, **fields: Any) -> list[dict[str, Any]]:
    from uma_trio.cli.running import run
    from uma_trio.client import BrokenProtocol, ClientError

    _, socket = context.obj
    try:
        found: list[dict[str, Any]] = run(_asked, socket, action, fields)
        return found
    except ClientError as error:
        click.echo(f"uma-trio sessions: {error}", err=True)
        sys.exit(3 if isinstance(error, BrokenProtocol) else 2)


async def _asked(socket: str | None, action: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    from uma_trio.client import open_client

    async with open_client(socket) as client:
        return await client.sessions(action, **fields)


def _show(context: click.Context, action: str, **fields: Any) -> None:
    found = _ask(context, action, **fields)
    if context.obj[0]:
        for session in found:
            click.echo(json.dumps(session, ensure_ascii=False))
    elif not found:
        click.echo('no sessions yet; begin one with: uma-trio ask --session NAME "..."')
    else:
        rows = [("SESSION", "TURNS", "TOKENS", "LAST USED", "STATE")]
        rows += [(_shown(s["session_id"]), str(s["turns"]), f"{s['tokens']:,}", _when(s["used_at"]), _state(s)) for s in found]
        widths = [max(len(row[n]) for row in rows) for n in range(5)]
        for row in rows:
            cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3].ljust(widths[3]), row[4]]
            click.echo("  ".join(cells).rstrip())


def _shown(name: str) -> str:
    """A name is whatever the client chose: nothing of it moves the cursor."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _state(session: dict[str, Any]) -> str:
    if session["busy"]:
        return "answering"
    return "on disk" if session["durable"] else "in memory only"
