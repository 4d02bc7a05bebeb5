"""``uma-trio ask``: ask one question and stream the answer to stdout."""

from __future__ import annotations

import json
import math
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from uma_trio.client import Eos

OK, SERVER_ERROR, PROTOCOL_ERROR = 0, 2, 3
INTERRUPTED = 130
"""The exit code that shells use for a program killed by SIGINT."""

OPTIONAL_FIELDS = (
    "max_tokens", "n", "top_p", "top_k", "min_p", "repetition_penalty", "repeat_last_n", "frequency_penalty",
    "presence_penalty", "logprobs", "seed", "n_keep",
)  # fmt: skip
"""Options that become fields of the request by the same name, if they are given."""

LIST_FIELDS = ("stop", "stop_token_ids", "logit_bias", "return_full_text")
"""Likewise, if they are not empty."""


@click.command("ask", short_help="Ask the daemon and stream the answer.")
@click.argument("question", required=False)
@click.option(
    "--prompt", help="The question, if not given as an argument. Without both, or with -, it is read from stdin."
)
@click.option("--system", help="System message before the question.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--no-special", is_flag=True, help="With --raw: treat control tokens in the text as plain text.")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum number of tokens to generate.")
@click.option("--n", type=click.IntRange(1, 16), help="Number of answers, printed one after another.")
@click.option("--temp", type=click.FloatRange(0), help="Temperature; 0 is greedy.  [default: 0]")
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
    help="With --json: report the log probability of each token and of this many alternatives.",
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
@click.option("--priority", type=click.Choice(["interactive", "normal", "background"]), help="Scheduling class.")
@click.option(
    "--session",
    help="Continue or begin this session; use --raw for all its requests or for none. See uma-trio sessions.",
)
@click.option(
    "--n-keep", type=click.IntRange(0), help="If the context is too small, drop the oldest tokens after this many."
)
@click.option("--full-text", "return_full_text", is_flag=True, help="Print the prompt first.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is complete.")
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON lines.")
@click.option("--cbor", is_flag=True, help="Use CBOR instead of JSON on the socket.")
@click.option("--stats", is_flag=True, help="Print usage and timings to stderr at the end.")
@click.option(
    "--socket", type=click.Path(), help="The daemon's socket.  [default: $UMA_SOCKET, or the one that serve uses]"
)
def command(question: str | None, prompt: str | None, **options: Any) -> None:
    """Ask the daemon and stream the answer to stdout.

    Ctrl-C cancels the request and waits for the server to confirm; a second Ctrl-C exits at once.  Exit codes:
    0 success, 2 server error or no server, 3 protocol error, 130 interrupted.

    \b
      uma-trio ask "What is the capital of France?"
      git diff | uma-trio ask --system "Summarise this change" --max-tokens 200
      uma-trio ask --session cooking "And without eggs?"
      uma-trio ask --raw --temp 0.8 --seed 7 "Once upon a time"
    """
    if question is not None and prompt is not None:
        raise click.UsageError("give the question once: as an argument or with --prompt")
    text = question if question is not None else prompt
    if text is None or text == "-":
        if sys.stdin.isatty() and text is None:
            raise click.UsageError('nothing to ask; try: uma-trio ask "What is the capital of France?"')
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    sys.exit(_ask(_request(text, options), options))


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
    if options["temp"] is not None:
        request["temperature"] = options["temp"]
    request |= {name: options[name] for name in OPTIONAL_FIELDS if options[name] is not None}
    request |= {name: options[name] for name in LIST_FIELDS if options[name]}
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


def _ask(request: dict[str, Any], options: dict[str, Any]) -> int:
    from uma_trio.cli.running import run
    from uma_trio.client import BrokenProtocol, NoServer, ServerError

    try:
        return run(_stream, request, options)
    except (NoServer, ServerError) as error:
        click.echo(f"uma-trio ask: {error}", err=True)
        return SERVER_ERROR
    except BrokenProtocol as error:
        click.echo(f"uma-trio ask: {error}", err=True)
        return PROTOCOL_ERROR


async def _stream(request: dict[str, Any], options: dict[str, Any]) -> int:
    import trio

    from uma_trio.client import Eos, Token, open_client
    from uma_trio.protocol.messages import UnknownEvent, to_fields

    request["id"] = "ask"
    encoding = "cbor" if options["cbor"] else "json"
    last: Eos | None = None
    async with trio.open_nursery() as nursery, open_client(options["socket"], encoding=encoding) as client:  # type: ignore[arg-type]

        async def cancel_on_interrupt() -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                await anext(signals)
                await client.cancel("ask")
                await anext(signals)
                nursery.cancel_scope.cancel()

        nursery.start_soon(cancel_on_interrupt)
        last_character = ""
        async for event in client.generate(**request):
            if isinstance(event, Eos):
                last = event
            if options["as_json"]:
                fields = event.fields if isinstance(event, UnknownEvent) else to_fields(event)
                click.echo(json.dumps(fields, ensure_ascii=False))
            elif isinstance(event, Token | Eos):
                text = event.text or ""
                if event.index is not None:  # with several answers, each comes whole
                    text = f"--- {event.index}\n{text}\n"
                last_character = text[-1:] or last_character
                click.echo(text, nl=False)
        if not options["as_json"] and last_character != "\n":
            click.echo()
        assert last is not None  # generate() ends with eos or raises
        if options["stats"]:
            _show_stats(last)
        if last.session is not None and not last.session.durable:
            click.echo("this session is in memory only and ends with the daemon; see its log", err=True)
        nursery.cancel_scope.cancel()
    if last is None or last.reason != "cancelled":
        return OK
    click.echo("cancelled", err=True)
    return INTERRUPTED


def _show_stats(eos: Eos) -> None:
    usage, timings = eos.usage, eos.timings
    parts = [
        f"{usage.prompt_tokens} prompt + {usage.completion_tokens} tokens",
        f"first after {timings.ttft_ms:.0f} ms" if timings.ttft_ms is not None else None,
        f"{timings.tokens_per_s:.1f} tokens/s" if timings.tokens_per_s else None,
        f"seed {eos.seed}" if eos.seed is not None else None,
        eos.reason,
    ]
    click.echo(", ".join(part for part in parts if part), err=True)
