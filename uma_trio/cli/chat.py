"""``uma-trio chat``: a conversation with the daemon on a terminal."""

from __future__ import annotations

from typing import Any

import click

from uma_trio.cli.ask import LIST_FIELDS, OPTIONAL_FIELDS
from uma_trio.cli.ask import command as ask
from uma_trio.cli.client_options import reporting_errors

SHARED_WITH_ASK = frozenset(
    {
        *("system", "max_tokens", "temp", "top_p", "top_k", "min_p", "repetition_penalty", "repeat_last_n"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "priority"),
        *("n_keep", "model", "session", "show_reasoning", "socket", "verbose"),
    }
)
"""Options of ``ask`` that mean the same here."""


@click.command(
    "chat",
    params=[option for option in ask.params if option.name in SHARED_WITH_ASK],
)
@click.option("--plain", is_flag=True, help="Show answers as they are, without rendering Markdown.")
def command(**options: Any) -> None:
    """Chat with the daemon on a terminal.

    With --session the daemon keeps the conversation, also after a restart.  Otherwise it ends with the program.

    Enter sends the message, and Alt-Enter (or a backslash before Enter) begins another line.  Ctrl-C cancels an answer;
    the partial answer stays in the conversation.  Ctrl-D ends the program.  /help lists more commands.

    If stdin is not a terminal, each line of it is one message, and the first error ends the program.  Exit codes are
    those of uma-trio ask.

    \b
      uma-trio chat
      uma-trio chat --session trip --system "Answer briefly." --temp 0.7
      printf 'What is the capital of France?\\nAnd of Italy?\\n' | uma-trio chat
    """
    from uma_trio.cli.chat_loop import Chat

    with reporting_errors("chat", options["socket"]):
        Chat(
            fields=_fields(options),
            session=options["session"],
            system=options["system"],
            socket=options["socket"],
            plain=options["plain"],
            show_reasoning=options["show_reasoning"],
        ).run()


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """What every request of the conversation has."""
    fields = {name: options[name] for name in OPTIONAL_FIELDS if options.get(name) is not None}
    fields |= {name: options[name] for name in LIST_FIELDS if options.get(name)}
    if options["temp"] is not None:
        fields["temperature"] = options["temp"]
    if options["priority"]:
        fields["slo"] = {"priority": options["priority"]}
    return fields
