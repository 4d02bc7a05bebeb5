"""``uma-trio chat``: a conversation with the daemon on a terminal."""

from __future__ import annotations

from typing import Any

import click

from uma_trio.cli.client_options import reporting_errors, socket_option
from uma_trio.cli.request_options import fields_of, request_options


@click.command("chat")
@request_options
@click.option("--plain", is_flag=True, help="Show answers as they are, without rendering Markdown.")
@socket_option()
def command(**options: Any) -> None:
    """Chat with the daemon on a terminal.

    With --session the daemon keeps the conversation, also after a restart.  Otherwise it ends with the program.

    Enter sends the message, and Alt-Enter (or a backslash before Enter) begins another line.  Ctrl-C cancels an answer;
    the partial answer stays in the conversation.  Ctrl-D ends the program.  /help lists more commands.

    While the model answers, a message interrupts it, and /stop, /answer and /say change the answer.  Any other command
    waits for the end of the answer, and so do the messages after it.

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
            fields=fields_of(options),
            session=options["session"],
            system=options["system"],
            socket=options["socket"],
            plain=options["plain"],
            show_reasoning=options["show_reasoning"],
        ).run()
