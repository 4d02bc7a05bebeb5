"""``uma-trio ps``: the models that are in memory."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from uma_trio.cli.client_options import name_daemon, reporting_errors, socket_option
from uma_trio.cli.stdio import fail, print_table

ANSWER_S: Final = 5.0
"""How long the daemon may take to answer."""
IN_MEMORY: Final = ("loading", "ready", "draining", "failed")
"""States of models that are shown."""
HEADINGS: Final = ("MODEL", "STATE", "MEMORY", "WHERE", "CELLS", "USED BY", "IDLE")


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@socket_option()
def command(as_json: bool, socket: str | None) -> None:
    """Show the models that the daemon has in memory or loads, and who uses them.

    \b
      STATE    ready, loading with its progress, draining, or failed
      MEMORY   weights and KV cache
      WHERE    devices that have weights
      CELLS    of the KV cache, in tokens: used by running requests, reserved for them, and all
      USED BY  number of running and waiting requests, and their users
      IDLE     time since the last request, and time until the model is unloaded

    Exit codes: 0 success, 2 no daemon.
    """
    from uma_trio.connect.query import query
    from uma_trio.protocol.address import socket_path

    path = socket_path(socket)
    with reporting_errors("ps", socket):
        try:
            [answer] = query(path, {"type": "models"}, timeout_s=ANSWER_S)
            [metrics] = query(path, {"type": "metrics"}, timeout_s=ANSWER_S)
        except TimeoutError:
            fail("ps", f"the daemon at {path} does not answer")
    name_daemon("ps", path, metrics)
    shown = rows(answer["models"], metrics)
    if as_json:
        click.echo(json.dumps(shown))
        return
    if not shown:
        click.echo("no model is loaded; the first request loads one", err=True)
        return
    _print([_cells(row) for row in shown])
    for row in shown:
        if row["reason"] is not None:
            click.echo(f"{row['name']}: {row['reason']}", err=True)


def _print(table: Sequence[tuple[str, ...]]) -> None:
    """Print a table; on a terminal that is too narrow for it, a list for each model."""
    widths = [max(map(len, column)) for column in zip(HEADINGS, *table, strict=True)]
    if not sys.stdout.isatty() or sum(widths) + 2 * len(widths) <= shutil.get_terminal_size().columns:
        print_table([HEADINGS, *table])
        return
    for number, row in enumerate(table):
        click.echo("\n" * bool(number), nl=False)
        for heading, cell in zip(HEADINGS, row, strict=True):
            if cell:
                click.echo(f"{heading:<9}{cell}")


def rows(models: Sequence[Mapping[str, Any]], snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is shown of each model that is in memory.  Pure.

    Args:
        models: as in the answer to a query for models.
        snapshot: of the metrics, whose first figures are those of one of the models.
    """
    counts = snapshot.get("models", {})
    rows = []
    for model in models:
        count = counts.get(model["name"], {})
        metrics = count.get("metrics") or (snapshot if snapshot.get("model") == model["name"] else {})
        if model["state"] not in IN_MEMORY:
            continue
        kv, is_ready = metrics.get("kv", {}), model["state"] == "ready"
        weights = {name: device["weights_bytes"] for name, device in metrics.get("devices", {}).items()}
        rows.append(
            {
                "name": model["name"],
                "aliases": model["aliases"],
                "state": model["state"],
                "progress": model.get("progress") if model["state"] == "loading" else None,
                "reason": model.get("reason"),
                "memory_bytes": model.get("memory_bytes"),
                "devices": {name: weight for name, weight in weights.items() if weight},
                "kv_cells": kv.get("cells") if is_ready else None,
                "kv_cells_used": kv.get("cells_used") if is_ready else None,
                "kv_cells_reserved": kv.get("cells_reserved") if is_ready else None,
                "requests": count.get("in_use", 0),
                "waiting": count.get("waiting", 0),
                "users": sorted(
                    name for name, figures in metrics.get("principals", {}).items() if any(figures.values())
                ),
                "idle_s": count.get("idle_s"),
                "unloads_in_s": model.get("unloads_in_s"),
                "pinned": model.get("pinned", False),
            }
        )
    return rows


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    from uma_trio.hub.variants import format_bytes

    progress = "" if row["progress"] is None else f" {row['progress']:.0%}"
    cells = ""
    if row["kv_cells"]:
        cells = f"{row['kv_cells_used']:,} used, {row['kv_cells_reserved']:,} reserved of {row['kv_cells']:,}"
    return (
        row["name"],
        row["state"] + progress,
        "" if row["memory_bytes"] is None else format_bytes(row["memory_bytes"]),
        ", ".join(row["devices"]),
        cells,
        _users(row),
        _idle(row),
    )


def _users(row: Mapping[str, Any]) -> str:
    parts = [f"{row['requests']} requests" if row["requests"] != 1 else "1 request"] if row["requests"] else []
    parts += [f"{row['waiting']} waiting"] if row["waiting"] else []
    who = f" of {', '.join(map(_principal, row['users']))}" if row["users"] else ""
    return ", ".join(parts) + who if parts else "nobody"


def _principal(name: str) -> str:
    """A principal for people: the name of a Unix user, or of a tenant."""
    kind, _, rest = name.partition(":")
    if kind == "uid" and rest.isdigit():
        if int(rest) == os.geteuid():
            return "you"
        try:
            return pwd.getpwuid(int(rest)).pw_name
        except KeyError:
            return f"user {rest}"
    return rest if kind == "tenant" else name


def _idle(row: Mapping[str, Any]) -> str:
    if row["idle_s"] is None:
        return ""
    ends = "" if row["unloads_in_s"] is None else f", unloaded in {_duration(row['unloads_in_s'])}"
    return f"{_duration(row['idle_s'])}{', pinned' if row['pinned'] else ends}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
