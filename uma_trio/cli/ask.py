"""``uma-trio ask``: one question, its answer streamed to stdout."""

from __future__ import annotations

import json
import math
import signal
import sys
from typing import Any

import click

OK, SERVER_ERROR, PROTOCOL_ERROR = 0, 2, 3
INTERRUPTED = 130
"""As shells number a program that SIGINT ended."""

GIVEN_OR_NOT = (
    "max_tokens", "n", "top_p", "top_k", "min_p", "repetition_penalty", "repeat_last_n", "frequency_penalty",
    "presence_penalty", "logprobs", "seed", "n_keep",
)  # fmt: skip
FULL_OR_EMPTY = ("stop", "stop_token_ids", "logit_bias", "return_full_text")
"""Options that are fields of a request by the same name."""


@click.command("ask", short_help="Ask the daemon and stream the answer.")
@click.argument("question", required=False)
@click.option("--prompt", help="The question, if not given as an argument; - or neither reads stdin.")
@click.option("--system", help="A system message before the question.")
@click.option("--raw", is_flag=True, help="Complete the text as it is, without the chat template.")
@click.option("--no-special", is_flag=True, help="Read no control tokens in the text (with --raw).")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens to generate.")
@click.option("--n", type=click.IntRange(1, 16), help="So many answers, one after another.")
@click.option("--temp", type=click.FloatRange(0), help="Temperature; 0 is greedy.  [default: 0]")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling.")
@click.option("--top-k", type=click.IntRange(0), help="Sample among the k likeliest; 0 is off.")
@click.option(
    "--min-p", type=click.FloatRange(0, 1), help="Sample among tokens so many times as likely as the likeliest."
)
@click.option("--repetition-penalty", type=click.FloatRange(0.1, 10), help="Above 1, recent tokens come less often.")
@click.option("--repeat-last-n", type=click.IntRange(0, 4096), help="How many tokens count as recent.")
@click.option(
    "--frequency-penalty", type=click.FloatRange(-2, 2), help="The same for each time that the answer has a token."
)
@click.option("--presence-penalty", type=click.FloatRange(-2, 2), help="The same once for each token of the answer.")
@click.option(
    "--logit-bias",
    multiple=True,
    metavar="ID=BIAS",
    callback=lambda _, __, given: _biases(given),
    help="Added to a token's logit, -100 (never) to 100; can be given several times.",
)
@click.option(
    "--logprobs", type=click.IntRange(0, 20), help="Tell how likely each token was, and so many others (with --json)."
)
@click.option("--seed", type=click.IntRange(0), help="Same seed, same answer.")
@click.option("--stop", multiple=True, help="Stop at this text; can be given several times.")
@click.option(
    "--stop-token",
    "stop_token_ids",
    type=click.IntRange(0),
    multiple=True,
    help="Stop at this token id; can be given several times.",
)
@click.option("--priority", type=click.Choice(["interactive", "normal", "background"]), help="Scheduling class.")
@click.option(
    "--session", help="Go on with this session, or begin it; with --raw each time, or never. See uma-trio sessions."
)
@click.option("--n-keep", type=click.IntRange(0), help="If all does not fit, forget the oldest tokens after so many.")
@click.option("--full-text", "return_full_text", is_flag=True, help="Print the prompt first.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is whole.")
@click.option("--json", "as_json", is_flag=True, help="Print the events as JSON lines.")
@click.option("--cbor", is_flag=True, help="Speak CBOR with the daemon instead of JSON.")
@click.option("--stats", is_flag=True, help="Print usage and timings to stderr at the end.")
@click.option("--socket", type=click.Path(), help="The daemon's socket.")
def command(question: str | None, prompt: str | None, **options: Any) -> None:
    """Ask the daemon and stream the answer to stdout.

    Ctrl-C cancels the request on the server; a second one does not wait for its answer.  Exit codes:
    0 success, 2 server error (or no server), 3 protocol error, 130 interrupted.

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
            raise click.UsageError("--raw sends the text as it is: there is no place for --system")
        request["prompt"] = text
        if options["no_special"]:
            request["parse_special"] = False
    elif options["no_special"]:
        raise click.UsageError("--no-special goes with --raw: of messages no control tokens are read")
    else:
        system = [{"role": "system", "content": options["system"]}] if options["system"] is not None else []
        request["messages"] = [*system, {"role": "user", "content": text}]
    if options["temp"] is not None:
        request["temperature"] = options["temp"]
    request |= {name: options[name] for name in GIVEN_OR_NOT if options[name] is not None}
    request |= {name: options[name] for name in FULL_OR_EMPTY if options[name]}
    if options["session"] is not None:
        request["session_id"] = options["session"]
    if options["priority"]:
        request["slo"] = {"priority": options["priority"]}
    return request


def _biases(given: tuple[str, ...]) -> dict[str, float]:
    """``ID=BIAS`` as the protocol has it; its bounds are the daemon's to check."""
    found = {}
    for each in given:
        token, _, bias = each.partition("=")
        try:
            found[str(int(token))] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{each!r} is no ID=BIAS, such as 612=-100") from None
        if not math.isfinite(found[str(int(token))]):
            raise click.BadParameter(f"{each!r}: a bias is a number")
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

    from uma_trio.client import open_client

    request["id"] = "ask"
    encoding = "cbor" if options["cbor"] else "json"
    last: dict[str, Any] = {}
    async with trio.open_nursery() as nursery, open_client(options["socket"], encoding=encoding) as client:  # type: ignore[arg-type]

        async def cancel_on_interrupt() -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                await anext(signals)
                await client.cancel("ask")
                await anext(signals)
                nursery.cancel_scope.cancel()

        nursery.start_soon(cancel_on_interrupt)
        ended = ""
        async for event in client.generate(**request):
            last = event
            if options["as_json"]:
                click.echo(json.dumps(event, ensure_ascii=False))
            else:
                text = event.get("text") or ""
                if "index" in event:  # whole answers, as they are done
                    text = f"--- {event['index']}\n{text}\n"
                ended = text[-1:] or ended
                click.echo(text, nl=False)
        if not options["as_json"] and ended != "\n":
            click.echo()
        if options["stats"]:
            _show_stats(last)
        if "session" in last and not last["session"]["durable"]:
            click.echo("this session is in memory only and ends with the daemon; its log says why", err=True)
        nursery.cancel_scope.cancel()
    if last.get("reason") != "cancelled":
        return OK
    click.echo("cancelled", err=True)
    return INTERRUPTED


def _show_stats(eos: dict[str, Any]) -> None:
    usage, timings = eos["usage"], eos["timings"]
    parts = [
        f"{usage['prompt_tokens']} prompt + {usage['completion_tokens']} tokens",
        f"first after {timings['ttft_ms']:.0f} ms" if timings.get("ttft_ms") is not None else None,
        f"{timings['tokens_per_s']:.1f} tokens/s" if timings.get("tokens_per_s") else None,
        f"seed {eos['seed']}" if "seed" in eos else None,
        eos["reason"],
    ]
    click.echo(", ".join(part for part in parts if part), err=True)
