"""``uma-trio attach``: what the daemon answers on its own."""

from __future__ import annotations

import sys
from typing import Any

import click

from uma_trio.cli.client_options import reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.exits import INCOMPLETE, OK, SERVER_ERROR
from uma_trio.cli.listed import all_option, chosen_names
from uma_trio.cli.stdio import note, print_table, when


@click.command("attach")
@click.argument("id", required=False)
@click.option(
    "--after",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Leave out the first N events: with --json, each event has its number.",
)
@click.option("--cancel", "action", flag_value="cancel", help="End the answer.")
@click.option("--delete", "action", flag_value="delete", help="Remove the answer; ends it before, if need be.")
@click.option("--json", "as_json", is_flag=True, help="Print events, or descriptions of answers, as JSON lines.")
@all_option
@click.option("--stats", is_flag=True, help="Print usage, timings and the id of the request to stderr at the end.")
@socket_option()
def command(
    id: str | None,
    after: int,
    action: str | None,
    as_json: bool,
    shows_all: bool,
    stats: bool,
    socket: str | None,
) -> None:
    """Print a detached answer from its beginning, and follow it to its end; without ID, list them.

    An answer is detached if it was begun with uma-trio ask --detach.  Ctrl-C ends this command, and not the answer.

    \b
      uma-trio ask --detach "Tell me a long story"
      uma-trio attach                        list answers
      uma-trio attach 5f0c2b7de94a1638       print one, and follow it
      uma-trio attach 5f0c2b7de94a1638 --cancel

    \b
    Exit codes:
        0  the answer is complete, or was cut by a limit: then a notice says so
        2  no daemon, no such answer, or the answer has failed
        4  the answer was cancelled, or is not complete by its constraint
    """
    from uma_trio.cli.run_trio import run

    if id is None and (after or action is not None):
        raise click.UsageError("name the answer; uma-trio attach without options lists them")
    if id is not None and shows_all:
        raise click.UsageError("--all goes with a list, so give no ID")
    code = SERVER_ERROR
    with reporting_errors("attach", socket):
        run(say_which_daemon, "attach", socket)
        if id is not None and action is None:
            code = run(_follow, id, after, as_json, stats, socket)
        else:
            code = run(_describe, id, action, as_json, shows_all, socket)
    sys.exit(code)


async def _follow(id: str, after: int, as_json: bool, stats: bool, socket: str | None) -> int:
    from uma_trio.cli.answer import TextPrinter, print_json, print_stats, warn_if_cut_elsewhere
    from uma_trio.client import Eos, open_client

    print_event = print_json if as_json else TextPrinter().print
    async with open_client(socket) as client:
        async for event in client.attach(id, after=after):
            print_event(event)
    assert isinstance(event, Eos)
    if not as_json:
        warn_if_cut_elsewhere(event)
    if stats:
        print_stats(event)
    if event.reason == "cancelled":
        note("the answer was cancelled")
    return INCOMPLETE if event.reason == "cancelled" or event.constraint_complete is False else OK


async def _describe(id: str | None, action: str | None, as_json: bool, shows_all: bool, socket: str | None) -> int:
    import json

    import attrs

    from uma_trio.client import AnswerInfo, open_client

    async with open_client(socket) as client:
        if id is None:
            answers = await client.answers()
        else:
            answers = await client.answers("delete" if action == "delete" else "cancel", answer_id=id)
    if as_json:
        for answer in answers:
            fields: dict[str, Any] = {name: value for name, value in attrs.asdict(answer).items() if value is not None}
            click.echo(json.dumps(fields))
        return OK

    def row(answer: AnswerInfo) -> tuple[str, ...]:
        return answer.answer_id, answer.state, str(answer.events), when(answer.created_at), answer.reason or ""

    if id is not None:
        note(f"{id} is deleted" if action == "delete" else f"{id} is {answers[0].state}")
    elif not answers:
        note("there are no detached answers; uma-trio ask --detach begins one")
    elif shown := chosen_names(answers, lambda answer: answer.answer_id, shows_all=shows_all):
        print_table([("ID", "STATE", "EVENTS", "BEGUN", "REASON"), *map(row, shown)])
    return OK
