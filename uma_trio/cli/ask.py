"""``uma-trio ask``: ask one question and stream the answer to stdout."""

from __future__ import annotations

import contextlib
import select
import signal
import sys
from pathlib import Path
from typing import Any

import click

from uma_trio.cli.client_options import reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.exits import INCOMPLETE, INTERRUPTED, OK, SERVER_ERROR
from uma_trio.cli.request_options import fields_of, not_empty, request_options, tool_fields
from uma_trio.cli.stdio import note, read_stdin, to_text

FLAGS = {"images": "image", "sounds": "audio", "no_special": "no-special"}
"""Flags with another name than their option."""

STDIN_NOTICE_S = 1.0
"""How long a pipe may be silent before the user hears that it is read."""


@click.command("ask")
@click.argument("question", nargs=-1)
@click.option("--prompt", help="The question, if not given as an argument.")
@click.option(
    "--raw",
    is_flag=True,
    help="Continue the text as it is, without the chat template. All requests of a session use it, or none.",
)
@click.option("--no-special", is_flag=True, help="With --raw: treat control tokens in the text as plain text.")
@click.option("--n", type=click.IntRange(1, 16), help="Number of answers, printed one after another.")
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    help="Show the probability of each token and of this many most likely ones; with --json, their logarithms.",
)
@request_options
@click.option(
    "--assistant",
    metavar="TEXT",
    callback=not_empty,
    help="Beginning of the answer, which the model continues.",
)
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask about this picture. The flag can be repeated.",
)
@click.option(
    "--audio",
    "sounds",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask about this sound: WAV, MP3 or FLAC. The flag can be repeated.",
)
@click.option(
    "--controller",
    metavar="NAME",
    help="Run this controller, which gets the text as its argument. See uma-trio controllers.",
)
@click.option(
    "--tools",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Offer these tools to the model: a JSON list, in the form of docs/PROTOCOL-REFERENCE.md or of the OpenAI API. "
    "Its calls are printed as JSON, one a line.",
)
@click.option(
    "--tool-choice",
    metavar="auto|none|required|NAME",
    help="With --tools: whether the answer must be a call, and of which tool.  [default: auto]",
)
@click.option("--full-text", "return_full_text", is_flag=True, default=None, help="Print the prompt first.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is complete.")
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON lines.")
@click.option("--cbor", is_flag=True, help="Use CBOR instead of JSON on the socket.")
@click.option(
    "--detach",
    is_flag=True,
    help="Let the daemon answer on its own, and print the id of the answer for uma-trio attach.",
)
@click.option("--stats", is_flag=True, help="Print usage, timings and the id of the request to stderr at the end.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Wait this long for a daemon to start and load its model.  [default: for as long as a daemon loads]",
)
@click.option("--no-wait", is_flag=True, help="Fail at once if the daemon still loads its model.")
@socket_option()
def command(question: tuple[str, ...], prompt: str | None, **options: Any) -> None:
    """Ask the daemon and stream the answer to stdout.

    QUESTION may be several words.  Text that is piped in follows it after a blank line, or takes its place.  Without
    either, on a terminal, a chat begins: see uma-trio chat.  Notices and errors go to stderr.

    \b
      uma-trio ask What is the capital of France
      git diff | uma-trio ask "Summarise this change:"
      uma-trio ask --session trip "What is the capital of France?"
      uma-trio ask --session trip "And of Italy?"
      uma-trio ask --raw --temp 0.8 --seed 7 --max-tokens 60 "Tell me a story about a fox"
      uma-trio ask --tools tools.json "How warm is it in Lima?"
      uma-trio ask --controller jsctrl < program.js
      uma-trio ask --choice Yes --choice No "Is Paris the capital of France?"
      uma-trio ask --assistant "The capital of" "What is the capital of France?"
      uma-trio attach $(uma-trio ask --detach "Tell me a long story")
      uma-trio ask --image cat.jpg "What is in this picture?"
      uma-trio ask --json --no-stream "What do blue and yellow make?" | jq -r .text

    Ctrl-C cancels the request and waits for the daemon to confirm; a second Ctrl-C exits at once.

    \b
    Exit codes:
        0  the answer is complete, or was cut by a limit: then a notice says so
        1  the output cannot be written
        2  wrong usage, no daemon, or the daemon refused
        3  the other side does not speak the protocol
        4  the answer is not complete by its constraint, such as JSON that was cut
      130  interrupted
      141  the reader of the output has gone, as with | head
    """
    from uma_trio.cli.run_trio import run

    if not question and prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        _chat_instead()
        return
    if question and prompt is not None:
        raise click.UsageError("give the question once: as an argument or with --prompt")
    request = _request(_text(" ".join(question) if prompt is None else prompt), options)
    code = SERVER_ERROR
    with reporting_errors("ask", options["socket"]):
        code = run(_detach if options["detach"] else _stream, request, options)
    sys.exit(code)


def _chat_instead() -> None:
    """Begin a chat with the options of this command: there is no question, but somebody who could ask."""
    from uma_trio.cli import main

    context = click.get_current_context()
    chat = main.get_command(context, "chat")
    assert chat is not None
    shared = {option.name for option in chat.params}
    for option in command.params:
        given = context.get_parameter_source(option.name or "") is not click.core.ParameterSource.DEFAULT
        if given and option.name not in shared:
            raise click.UsageError(
                f"nothing to ask; a chat, which would begin without a question, has no {option.opts[0]}"
            )
    context.invoke(chat, **{name: value for name, value in context.params.items() if name in shared})


def _text(question: str) -> str:
    """The question, and after a blank line what is piped in; ``-`` stands for no question."""
    parts = ["" if question == "-" else question]
    if question == "-" or not sys.stdin.isatty():
        parts.append(_read_stdin())
    text = "\n\n".join(part for part in parts if part.strip())
    if not text:
        raise click.UsageError(
            'nothing to ask: there is no question, and nothing was piped in; try: uma-trio ask "What is the capital of '
            'France?"'
        )
    return text


def _read_stdin() -> str:
    """Read what is piped in, to its end.  Says so if nothing comes: another program may have left a pipe open."""
    with contextlib.suppress(OSError, ValueError):  # stdin is not a file, as in a test
        if not sys.stdin.isatty() and not select.select([sys.stdin], [], [], STDIN_NOTICE_S)[0]:
            click.echo("uma-trio ask: waiting for the end of stdin; to ask without it, add < /dev/null", err=True)
    return to_text(read_stdin())


def _request(text: str, options: dict[str, Any]) -> dict[str, Any]:
    whole = options["no_stream"] or ((options["n"] or 1) > 1 and not options["as_json"])
    request: dict[str, Any] = {"stream": not whole, **fields_of(options), **tool_fields(options)}
    if options["controller"] is not None:
        for name in ("raw", "system", "assistant", "tools", "no_special", "images", "sounds"):
            if options[name] not in (None, False, ()):
                raise click.UsageError(
                    f"--controller makes its own prompt, with no place for --{FLAGS.get(name, name)}"
                )
        from uma_trio.cli.controllers import note_if_file

        note = f"the question is the controller's argument itself. For what is in {text}, use < {text}"
        note_if_file(text, note)
        request |= {"controller": options["controller"], "controller_arg": text}
    elif options["raw"]:
        for name in ("system", "assistant", "tools", "images", "sounds"):
            if options[name] not in (None, ()):
                raise click.UsageError(f"--raw sends the text as it is, with no place for --{FLAGS.get(name, name)}")
        request["prompt"] = text
        if options["no_special"]:
            request["parse_special"] = False
    elif options["no_special"]:
        raise click.UsageError("--no-special goes with --raw: chat messages never contain control tokens")
    else:
        from uma_trio.cli.content import content_with

        system = [{"role": "system", "content": options["system"]}] if options["system"] is not None else []
        content = content_with(options["images"], options["sounds"], text)
        request["messages"] = [*system, {"role": "user", "content": content}]
        request["separate_reasoning"] = True
        if options["assistant"] is not None:
            request["messages"].append({"role": "assistant", "content": options["assistant"]})
            request["continue_final_message"] = True
    if options["session"] is not None:
        request["session_id"] = options["session"]
    return request


async def _detach(request: dict[str, Any], options: dict[str, Any]) -> int:
    """Have the request answered by the daemon on its own, and print the id of the answer."""
    from uma_trio.cli.generation import connected

    async with connected(options["socket"], wait_s=0 if options["no_wait"] else options["wait"]) as client:
        answer = await client.detach(**request)
    if not answer.durable:
        note("this answer is in memory only and ends with the daemon; see its log")
    click.echo(answer.answer_id)
    return OK


async def _stream(request: dict[str, Any], options: dict[str, Any]) -> int:
    if "controller" in request:
        from uma_trio.cli.controllers import stream

        wait_s = 0 if options["no_wait"] else options["wait"]
        return await stream(request, options["socket"], options["as_json"], options["stats"], wait_s)
    from uma_trio.cli.answer import TextPrinter, print_json, print_stats, warn_if_cut, warn_if_in_memory
    from uma_trio.cli.generation import generate, new_id
    from uma_trio.client import Eos, Event

    as_json, socket = options["as_json"], options["socket"]
    wait_s = 0 if options["no_wait"] else options["wait"]
    begun = "" if options["assistant"] is None or options["return_full_text"] else options["assistant"]
    print_event = print_json if as_json else TextPrinter(show_reasoning=options["show_reasoning"], begun=begun).print

    ends: list[Eos] = []
    several: list[Eos] = []

    def show(event: Event) -> None:
        if isinstance(event, Eos) and event.index is not None and not as_json:
            several.append(event)  # they end in any order
        else:
            show_now(event)

    def show_now(event: Event) -> None:
        print_event(event)
        if isinstance(event, Eos):
            ends.append(event)
            if not as_json:
                warn_if_cut(event, options["max_tokens"])
            if options["stats"]:
                print_stats(event)
            warn_if_in_memory(event)
            for warning in event.warnings or ():
                note(f"uma-trio ask: {warning}")

    await say_which_daemon("ask", socket, wait_s)
    is_shown = sys.stderr.isatty() and not as_json
    try:
        eos = await generate(
            {"id": new_id("ask"), "progress": is_shown, "forecast": is_shown, **request},
            show,
            socket,
            signals=(signal.SIGINT, signal.SIGTERM),
            encoding="cbor" if options["cbor"] else "json",
            wait_s=wait_s,
        )
    finally:
        for end in sorted(several, key=lambda end: end.index or 0):
            show_now(end)
    if eos is not None and eos.session is not None and eos.session.turns == 1:
        await _say_who_has_it(eos.session.session_id, options["model"], socket)
    if eos is not None and eos.reason != "cancelled":
        return INCOMPLETE if any(end.constraint_complete is False for end in ends) else OK
    click.echo("cancelled", err=True)
    return INTERRUPTED


async def _say_who_has_it(session_id: str, model: str | None, socket: str | None) -> None:
    """Say on stderr if other models have a session of the name of one that has just begun."""
    from uma_trio.cli.sessions import models_with_session
    from uma_trio.client import open_client

    async with open_client(socket) as client:
        others = await models_with_session(client, session_id, model)
    if others:
        note(
            f"this began a new session; another one of this name is of the model {' and of '.join(others)}: "
            f"ask it with --model {others[0]}"
        )
