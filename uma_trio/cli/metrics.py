"""``uma-trio metrics``: print the metrics of the daemon, once or repeatedly."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click

NOTES: Final = {
    "sessions": "stored sessions of all users; see uma-trio sessions",
}
"""Explanations of names that could be misunderstood."""


@click.command("metrics", short_help="Show the metrics of the daemon.")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option(
    "--interval", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Seconds between repetitions."
)
@click.option("--json", "as_json", is_flag=True, help="Print each snapshot as a line of JSON.")
@click.option(
    "--socket", type=click.Path(), help="The daemon's socket.  [default: $UMA_SOCKET, or the one that serve uses]"
)
def command(watch: bool, interval: float, as_json: bool, socket: str | None) -> None:
    """Show the metrics of the daemon.  docs/METRICS.md explains every field.

    The daemon answers at once, also during a long prefill.  Exit codes: 0 success, 2 server error or no server,
    3 protocol error.

    \b
      uma-trio metrics --watch
      uma-trio metrics --json | jq .tokens_total
    """
    from uma_trio.cli.running import run
    from uma_trio.client import BrokenProtocol, ClientError

    try:
        run(_watch, interval if watch else None, as_json, socket)
    except KeyboardInterrupt:
        sys.exit(0)
    except ClientError as error:
        click.echo(f"uma-trio metrics: {error}", err=True)
        sys.exit(3 if isinstance(error, BrokenProtocol) else 2)


async def _watch(interval: float | None, as_json: bool, socket: str | None) -> None:
    import trio

    from uma_trio.client import open_client

    while True:
        async with open_client(socket) as client:
            snapshot = await client.metrics()
        if as_json:
            click.echo(json.dumps(snapshot))
        else:
            if interval is not None and sys.stdout.isatty():
                click.clear()
            click.echo("\n".join(_lines(snapshot)))
        if interval is None:
            return
        await trio.sleep(interval)


def _lines(snapshot: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in snapshot.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name:<{26 - len(indent)}} {f'({NOTES[name]})' if name in NOTES else ''}".rstrip())
            lines += _lines(value, indent + "  ") or [f"{indent}  none yet"]
        else:
            note = NOTES.get(name, "")
            lines.append(f"{indent}{name:<{26 - len(indent)}} {_shown(value)}{note and f'  ({note})'}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
