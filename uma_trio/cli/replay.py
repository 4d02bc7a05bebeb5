"""``uma-trio replay``: computes a logged answer again, and compares."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from uma_trio.cli.client_options import reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.exits import INCOMPLETE, OK, SERVER_ERROR
from uma_trio.cli.perf import read_logs
from uma_trio.cli.stdio import note

if TYPE_CHECKING:
    from uma_trio.telemetry.replays import Comparison, Logged

WAIT_S: Final = 10.0
"""How long the daemon may take to write the replay to its log."""
LOGGED_S: Final = 2.0
"""How long it may take to write an answer that has just ended."""


@click.command("replay")
@click.argument("id")
@click.option(
    "--log",
    "logs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    required=True,
    help="A perf log with the answer, oldest first; the last one is that of the daemon that answers now.",
)
@click.option(
    "--request",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The request as JSON, if the log has hashes only.",
)
@socket_option()
def command(id: str, logs: Sequence[Path], request: Path | None, socket: str | None) -> None:
    """Compute a logged answer again, alone, and say whether it is equal, or where and why it differs.

    ID is the id of the answer over HTTP, such as chatcmpl-req-..., or its x-request-id; over the socket the id that the
    client gave, for uma-trio ask the one that --stats prints; of several with one id, the last one is computed.

    The daemon writes what it takes with serve --perf-log FILE --perf-log-replay prompts. With serve --reproducible,
    answers are equal also if they shared batches with others.

    \b
    Exit codes:
        0  equal
        2  the answer is not in the log, cannot be computed again, or there is no daemon
        4  it differs
    """
    from uma_trio.cli.run_trio import run
    from uma_trio.telemetry.replays import compare

    logged = _wait_for(id, logs, LOGGED_S)
    if logged is None:
        _fail(f"{id!r} is not in the log, or without what a replay needs: serve with --perf-log-replay prompts")
    if logged.n_alike > 1:
        note(
            f"{logged.n_alike} answers have the id {id!r}; this is the last one, of {_end_of(logged):%Y-%m-%d %H:%M:%S}"
        )
    with reporting_errors("replay", socket):
        run(say_which_daemon, "replay", socket)
        try:
            name = run(ask_again, _fields(logged, request), socket)
        except TypeError as error:
            _fail(f"{request}: {error}")
    again = _wait_for(name, logs, WAIT_S)
    if again is None:
        _fail(f"the replay {name} is in none of these logs: the daemon that answers writes another one")
    comparison = compare(logged, again)
    click.echo("\n".join(in_words(comparison)))
    sys.exit(OK if comparison.equal else INCOMPLETE)


def _wait_for(id: str, logs: Sequence[Path], wait_s: float) -> Logged | None:
    """The answer with this id, as soon as it is in the logs; ``None`` if it is not there in time."""
    from uma_trio.telemetry.replays import find

    until = time.monotonic() + wait_s
    while (logged := find(read_logs(logs), id)) is None and time.monotonic() < until:
        time.sleep(0.2)
    return logged


def _end_of(logged: Logged) -> datetime.datetime:
    started = datetime.datetime.fromisoformat(logged.header.started)
    return started + datetime.timedelta(seconds=logged.record.finished_s)


def _fail(message: str) -> NoReturn:
    note(message)
    sys.exit(SERVER_ERROR)


def _fields(logged: Logged, request: Path | None) -> dict[str, Any]:
    """The request that computes the answer again."""
    import msgspec

    if logged.replay.inexact:
        _fail(f"this answer cannot be computed again by its prompt: {logged.replay.inexact}")
    if logged.replay.fields:
        return logged.replay.fields
    if request is None:
        _fail("the log has hashes only: give the request with --request FILE")
    try:
        fields = msgspec.json.decode(request.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, OSError) as error:
        _fail(f"{request} is not one request in JSON: {error}")
    return {**fields, **logged.replay.sampling}


async def ask_again(fields: dict[str, Any], socket: str | None) -> str:
    """Have the answer computed; returns the id under which it is in the daemon's log."""
    import secrets

    from uma_trio.client import open_client

    name = f"replay-{secrets.token_hex(8)}"
    async with open_client(socket) as client:
        alone = {"cache_prompt": False, "speculate": False}
        async for _ in client.generate(**{**fields, **alone, "id": name}):
            pass
    return name


def in_words(comparison: Comparison) -> list[str]:
    """The lines that people read."""
    if comparison.equal:
        return [f"equal: all {comparison.n_tokens} tokens"]
    where = (
        ""
        if comparison.differs_at is None
        else f" from token {comparison.differs_at} on: {comparison.was} was computed as {comparison.now}"
    )
    return [f"differs{where}", *[f"  {cause}" for cause in comparison.causes]]
