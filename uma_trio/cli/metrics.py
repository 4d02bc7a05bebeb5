"""``uma-trio metrics``: the daemon's snapshot, once or again and again."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click

NOTES: Final = {
    "sessions": "open connections",
    "conversations": "what uma-trio sessions lists, of all users",
}
"""Where a name alone would be taken for something else."""


@click.command("metrics", short_help="Show what the daemon measures.")
@click.option("--watch", is_flag=True, help="Show again every --interval until Ctrl-C.")
@click.option("--interval", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line a snapshot.")
@click.option(
    "--socket", type=click.Path(), help="The daemon's socket.  [default: $UMA_SOCKET, or the one that serve uses]"
)
def command(watch: bool, interval: float, as_json: bool, socket: str | None) -> None:
    """Show what the daemon measures.  docs/METRICS.md explains every field.

    The answer does not wait for the model: it comes while a long prompt is read.
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
