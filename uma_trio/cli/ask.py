"""``uma-trio ask``: ask one question and stream the answer to stdout."""

from __future__ import annotations

import contextlib
import math
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from uma_trio.cli.client_options import is_verbose, reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.completion import session_name
from uma_trio.cli.constraint import constraint_of, constraint_options
from uma_trio.cli.exits import INTERRUPTED, OK, SERVER_ERROR

if TYPE_CHECKING:
    from uma_trio.client import Eos

STDIN_NOTICE_S = 1.0
"""How long a pipe may be silent before the user hears that it is read."""

OPTIONAL_FIELDS = (
    "max_tokens", "n", "top_p", "top_k", "min_p", "repetition_penalty", "repeat_last_n", "frequency_penalty",
    "presence_penalty", "logprobs", "seed", "n_keep", "model",
)  # fmt: skip
"""Options that become fields of the request by the same name, if they are given."""

LIST_FIELDS = ("stop", "stop_token_ids", "logit_bias", "return_full_text")
"""Likewise, if they are not empty."""


@click.command("ask")
@click.argument("question", nargs=-1)
@click.option("--prompt", help="The question, if not given as an argument.")
@click.option("--model", help="Name of the model that answers.  [default: the daemon's first]")
@click.option("--system", help="System message before the question.")
@click.option(
    "--raw",
    is_flag=True,
    help="Continue the text as it is, without the chat template. A session has it for all its requests or for none.",
)
@click.option("--no-special", is_flag=True, help="With --raw: treat control tokens in the text as plain text.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help="Maximum number of tokens to generate.  [default: as many as the daemon has room for]",
)
@click.option("--n", type=click.IntRange(1, 16), help="Number of answers, printed one after another.")
@click.option(
    "--temp", type=click.FloatRange(0), help="Temperature; 0 is greedy.  [default: that of the daemon or the model]"
)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling.")
@click.option("--top-k", type=click.IntRange(0), help="Sample from the k most likely tokens; 0 is off.")
@click.option(
    "--min-p",
    type=click.FloatRange(0, 1),
    help="Sample from tokens with at least this fraction of the top token's probability.",
)
@click.option("--repetition-penalty", type=click.FloatRange(0.1, 10), help="Above 1, recent tokens become less likely.")
@click.option(
    "--repeat-last-n", type=click.IntRange(0, 4096), help="Number of recent tokens that --repetition-penalty looks at."
)
@click.option(
    "--frequency-penalty",
    type=click.FloatRange(-2, 2),
    help="Subtracted from a token's logit for each time that it is in the answer.",
)
@click.option(
    "--presence-penalty",
    type=click.FloatRange(-2, 2),
    help="Subtracted once from the logit of each token in the answer.",
)
@click.option(
    "--logit-bias",
    multiple=True,
    metavar="ID=BIAS",
    callback=lambda _, __, given: _biases(given),
    help="Number added to a token's logit, from -100 (never) to 100; repeatable.",
)
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    help="Show the probability of each token and of this many most likely ones; with --json, their logarithms.",
)
@click.option("--seed", type=click.IntRange(0), help="The same seed gives the same answer.")
@click.option("--stop", multiple=True, help="Stop at this text; repeatable.")
@click.option(
    "--stop-token",
    "stop_token_ids",
    type=click.IntRange(0),
    multiple=True,
    help="Stop at this token id; repeatable.",
)
@constraint_options
@click.option("--priority", type=click.Choice(["interactive", "normal", "background"]), help="Scheduling class.")
@click.option(
    "--session",
    shell_complete=session_name,
    help="Continue or begin this session. See uma-trio sessions.",
)
@click.option(
    "--n-keep", type=click.IntRange(0), help="If the context is too small, drop the oldest tokens after this many."
)
@click.option(
    "--show-reasoning/--hide-reasoning",
    "show_reasoning",
    default=None,
    help="Print the model's reasoning on stderr, in front of the answer.  [default: on a terminal]",
)
@click.option("--full-text", "return_full_text", is_flag=True, help="Print the prompt first.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is complete.")
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON lines.")
@click.option("--cbor", is_flag=True, help="Use CBOR instead of JSON on the socket.")
@click.option("--stats", is_flag=True, help="Print usage and timings to stderr at the end.")
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
      uma-trio ask --choice yes --choice no "Is Paris in France?"
      uma-trio ask --json --no-stream "What do blue and yellow make?" | jq -r .text

    Ctrl-C cancels the request and waits for the daemon to confirm; a second Ctrl-C exits at once.

    \b
    Exit codes:
        0  the answer is complete, or was cut by a limit: then a notice says so
        1  the output cannot be written
        2  wrong usage, no daemon, or the daemon refused
        3  the other side does not speak the protocol
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
        code = run(_stream, request, options)
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
    """The question, and behind a blank line what is piped in; ``-`` stands for no question."""
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
    with contextlib.suppress(OSError, ValueError):  # stdin is no file, as in a test
        if not sys.stdin.isatty() and not select.select([sys.stdin], [], [], STDIN_NOTICE_S)[0]:
            click.echo("uma-trio ask: waiting for the end of stdin; to ask without it, add < /dev/null", err=True)
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def _request(text: str, options: dict[str, Any]) -> dict[str, Any]:
    whole = options["no_stream"] or ((options["n"] or 1) > 1 and not options["as_json"])
    request: dict[str, Any] = {"stream": not whole}
    if options["raw"]:
        if options["system"] is not None:
            raise click.UsageError("--raw sends the text as it is, with no place for --system")
        request["prompt"] = text
        if options["no_special"]:
            request["parse_special"] = False
    elif options["no_special"]:
        raise click.UsageError("--no-special goes with --raw: chat messages never contain control tokens")
    else:
        system = [{"role": "system", "content": options["system"]}] if options["system"] is not None else []
        request["messages"] = [*system, {"role": "user", "content": text}]
        request["separate_reasoning"] = True
    if options["temp"] is not None:
        request["temperature"] = options["temp"]
    request |= {name: options[name] for name in OPTIONAL_FIELDS if options[name] is not None}
    request |= {name: options[name] for name in LIST_FIELDS if options[name]}
    constraint = constraint_of(options)
    if constraint is not None:
        request["constraint"] = constraint
    if options["session"] is not None:
        request["session_id"] = options["session"]
    if options["priority"]:
        request["slo"] = {"priority": options["priority"]}
    return request


def _biases(given: tuple[str, ...]) -> dict[str, float]:
    """Parse ``ID=BIAS`` into the protocol's map.  The daemon checks the bounds."""
    found = {}
    for each in given:
        token, _, bias = each.partition("=")
        try:
            found[str(int(token))] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{each!r} is not ID=BIAS, such as 612=-100") from None
        if not math.isfinite(found[str(int(token))]):
            raise click.BadParameter(f"{each!r}: a bias must be a finite number")
    return found


async def _stream(request: dict[str, Any], options: dict[str, Any]) -> int:
    import trio

    from uma_trio.cli.answer import PrefillBar, TextPrinter, print_json
    from uma_trio.client import Eos, open_client

    as_json, reason = options["as_json"], ""
    request["id"] = "ask"
    if sys.stderr.isatty() and not as_json:
        request["progress"] = True
    show = print_json if as_json else TextPrinter(show_reasoning=options["show_reasoning"]).print
    connecting = open_client(
        options["socket"],
        encoding="cbor" if options["cbor"] else "json",
        wait_s=0 if options["no_wait"] else options["wait"],
        on_loading=_say_that_it_loads,
    )
    async with trio.open_nursery() as nursery, connecting as client:

        async def cancel_on_interrupt() -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                await anext(signals)
                await client.cancel("ask")
                await anext(signals)
                nursery.cancel_scope.cancel()

        nursery.start_soon(cancel_on_interrupt)
        if is_verbose():
            await say_which_daemon("ask", options["socket"])
        with PrefillBar() as bar:
            async for event in client.generate(**request):
                bar.update(event)
                show(event)
                if isinstance(event, Eos):
                    reason = event.reason
                    _show_end(event, options)
        nursery.cancel_scope.cancel()
    if reason and reason != "cancelled":
        return OK
    click.echo("cancelled", err=True)
    return INTERRUPTED


def _show_end(eos: Eos, options: dict[str, Any]) -> None:
    """Print on stderr what the user should know about an answer that has ended."""
    from uma_trio.cli.answer import print_stats, warn_if_cut

    if not options["as_json"]:
        warn_if_cut(eos, options["max_tokens"])
    if options["stats"]:
        print_stats(eos)
    if eos.session is not None and not eos.session.durable:
        click.echo("this session is in memory only and ends with the daemon; see its log", err=True)


def _say_that_it_loads(path: Path) -> None:
    if sys.stderr.isatty():
        click.echo(f"waiting for the daemon at {path}, which still loads its model; Ctrl-C gives up", err=True)
