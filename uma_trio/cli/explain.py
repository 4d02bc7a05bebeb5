"""``uma-trio explain``: why tokens of a prompt were computed again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from uma_trio.cli.client_options import reporting_errors, say_which_daemon, socket_option

if TYPE_CHECKING:
    from uma_trio.client import Explanation
    from uma_trio.protocol.usage import Obstacle

KINDS: Final = {
    "number": "a number",
    "date": "a date or a time",
    "tools_order": "the order of the tools",
    "tools": "the tools",
    "template": "text of the chat template, such as one of its variables",
    "text": "the text",
    "shorter": "nothing, but the earlier one goes on",
}
CAUSES: Final = {
    "room": "needed its place in the KV cache",
    "limit": "Idle sequences had more than their share of the KV cache",
    "continued": "that begins alike went on from a part of it",
    "engine": "The engine was started again",
}

OBSTACLES: Final[Mapping[Obstacle, str]] = {
    "short": "So few tokens are computed sooner than the sequence that has them is copied",
    "checkpoint": "The memory of this model goes back to checkpoints only, and there was none",
    "computing": "Another request was still computing them",
}


@click.command("explain")
@click.argument("id")
@click.option("--model", help="The model that answered.  [default: the daemon's first]")
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as JSON.")
@socket_option()
def command(id: str, model: str | None, as_json: bool, socket: str | None) -> None:
    """Say which tokens of a request's prompt were computed although an earlier prompt began alike, and why.

    ID is the id of the request, over HTTP the id of its answer, such as chatcmpl-req-..., or the x-request-id; for
    uma-trio ask the one that --stats prints.  The daemon knows the last ones.
    """
    from uma_trio.cli.generation import asked
    from uma_trio.cli.run_trio import run
    from uma_trio.protocol.messages import to_fields

    with reporting_errors("explain", socket):
        run(say_which_daemon, "explain", socket)
        explanation = run(partial(asked, socket, wait_s=0), lambda client: client.explain(id, model=model))
    if as_json:
        import json

        click.echo(json.dumps(to_fields(explanation)))
    else:
        click.echo("\n".join(in_words(explanation)))


def in_words(explanation: Explanation) -> list[str]:
    """The lines that people read."""
    lines = [f"{explanation.cached_tokens} of {explanation.prompt_tokens} tokens of the prompt were in the KV cache"]
    again = f"{explanation.again_tokens} tokens were computed again, in about {explanation.cost_ms:.0f} ms"
    match explanation.reason:
        case "cached":
            lines.append("it goes on where an earlier prompt or answer ends: nothing was computed again")
        case "new" if explanation.cached_tokens > explanation.common_tokens:
            lines.append(
                "nothing is known of the prompt that they belonged to: the daemon was started since, or has forgotten it, "
                "as it knows the last ones only"
            )
        case "new":
            lines.append("no earlier prompt that is known begins like it")
        case "private":
            lines.append("the request has cache_prompt: false")
        case "not_shared":
            lines.append(
                f"{explanation.common_tokens} tokens were there, but this request could not take all of them; {again}"
            )
            if explanation.obstacle is not None:
                lines.append(OBSTACLES[explanation.obstacle])
        case "lost":
            lines += [f"{explanation.common_tokens} tokens had been in the KV cache; {again}", _loss(explanation)]
        case "changed":
            lines += [
                f"it differs from an earlier prompt after {explanation.common_tokens} tokens; {again}",
                *_change(explanation),
            ]
    return lines


def _loss(explanation: Explanation) -> str:
    assert explanation.loss is not None
    cause = CAUSES[explanation.loss.cause]
    if explanation.loss.claimant is not None:
        owner = "of yours" if explanation.loss.claimant == "you" else "of somebody else"
        cause = f"Another request {owner} {cause}"
    return f"{cause}, {explanation.loss.ago_ms / 1e3:.1f} s ago"


def _change(explanation: Explanation) -> list[str]:
    change = explanation.change
    assert change is not None
    where = "" if change.message_index is None else f", in message {change.message_index} ({change.role})"
    return [
        f"what differs is {KINDS[change.kind]}{where}",
        f"  after  {change.before!r}",
        f"  was    {change.was!r}",
        f"  is now {change.now!r}",
    ]
