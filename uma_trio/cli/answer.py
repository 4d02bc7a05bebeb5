"""Prints an answer: its text as it comes, log probabilities, usage, and a notice when it is not complete."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from uma_trio.cli.stdio import note

if TYPE_CHECKING:
    from uma_trio.client import Eos, Event
    from uma_trio.protocol.chat import ToolCall
    from uma_trio.protocol.events import Generated, Logprob, Logprobs


_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """``text`` with U+FFFD for control characters, except tabs and line breaks: a model can write anything."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))


def print_json(event: Event) -> None:
    """Print an event as a line of JSON."""
    from uma_trio.protocol.events import UnknownEvent
    from uma_trio.protocol.messages import to_fields

    fields = event.fields if isinstance(event, UnknownEvent) else to_fields(event)
    click.echo(json.dumps(fields, ensure_ascii=False))


def call_line(call: ToolCall) -> str:
    """A call as JSON on one line."""
    return json.dumps({"id": call.id, "name": call.name, "arguments": call.arguments}, ensure_ascii=False)


class TextPrinter:
    """Prints the events of a request as text.

    Several answers come whole, each under its number.  Log probabilities follow their answer as a table.

    Args:
        show_reasoning: as in ``ReasoningPrinter``.
        begun: the beginning of each answer, which the events continue.
    """

    def __init__(self, *, show_reasoning: bool | None = None, begun: str = "") -> None:
        self._begun = begun
        self._is_begun = False
        self._reasoning = ReasoningPrinter(shown=show_reasoning)
        self._scores: list[Generated | Logprobs] = []
        self._last_character = ""

    def print(self, event: Event) -> None:
        """Print the text of ``event``, if it has any."""
        from uma_trio.client import Eos, Reasoning, Token

        if isinstance(event, Token | Reasoning) and event.logprob is not None:
            self._scores.append(event)
        if isinstance(event, Reasoning):
            self._reasoning.feed(event.text)
        elif isinstance(event, Token):
            self._begin()
            self._echo(event.text)
        elif isinstance(event, Eos):
            self._scores += event.logprobs or []
            if event.index is not None:
                click.echo(f"--- {event.index}")
            self._reasoning.feed(event.reasoning or "")
            self._begin()
            self._is_begun = False
            self._echo(event.text or "")
            if self._last_character or not event.tool_calls:
                self._end_line()
            for call in event.tool_calls or ():
                click.echo(call_line(call))
            if self._scores:
                click.echo("\n".join(["", *_table(self._scores)]))
                self._scores = []

    def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._echo(self._begun)

    def _echo(self, text: str) -> None:
        if text:
            self._reasoning.close()
        self._last_character = text[-1:] or self._last_character
        # color=True: click would otherwise remove escape sequences, which a pipe gets as the model wrote them
        click.echo(printable(text) if sys.stdout.isatty() else text, nl=False, color=True)

    def _end_line(self) -> None:
        self._reasoning.close()
        if self._last_character != "\n":
            click.echo()
        self._last_character = ""


class ReasoningPrinter:
    """Prints reasoning on stderr, dim, so that it is no part of the answer on stdout.

    Args:
        shown: print it; ``None``: on a terminal.
    """

    def __init__(self, *, shown: bool | None) -> None:
        self._shown = sys.stdout.isatty() and sys.stderr.isatty() if shown is None else shown
        self._last_character = ""

    @property
    def is_open(self) -> bool:
        """Whether reasoning was printed, and no text of the answer after it yet."""
        return bool(self._last_character)

    def feed(self, text: str) -> None:
        """Append ``text`` to the reasoning."""
        if self._shown and text:
            click.echo(click.style(printable(text), dim=True), err=True, nl=False)
            self._last_character = text[-1]

    def close(self) -> None:
        """End the reasoning with an empty line, if there is some: the answer follows."""
        if self.is_open:
            click.echo("\n" if self._last_character != "\n" else "", err=True)
            self._last_character = ""


def _table(scores: Sequence[Generated | Logprobs]) -> list[str]:
    """One line a token: its probability, the token, and the most likely tokens at its place with theirs."""
    shown = [_quoted(score.bytes or []) for score in scores]
    width = max(map(len, shown))
    return [
        f"{_percent(score.logprob or 0.0)}  {text:<{width}}  {_alternatives(score.top_logprobs or [])}".rstrip()
        for score, text in zip(scores, shown, strict=True)
    ]


def _alternatives(tokens: Sequence[Logprob]) -> str:
    return "  ".join(f"{_percent(token.logprob)} {_quoted(token.bytes)}" for token in tokens)


def _quoted(data: Sequence[int]) -> str:
    return repr(bytes(data).decode("utf-8", "backslashreplace"))


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):5.1f}%"


def print_stats(eos: Eos) -> None:
    """Print usage, timings and the request's id of an answer on stderr."""
    usage, timings = eos.usage, eos.timings
    parts = [
        f"{usage.prompt_tokens} prompt + {usage.completion_tokens} tokens",
        f"{usage.reasoning_tokens} of them reasoning" if usage.reasoning_tokens else None,
        f"first after {timings.ttft_ms:.0f} ms" if timings.ttft_ms is not None else None,
        f"{timings.tokens_per_s:.1f} tokens/s" if timings.tokens_per_s else None,
        f"seed {eos.seed}" if eos.seed is not None else None,
        eos.reason,
        f"id {eos.id}",
    ]
    note(", ".join(part for part in parts if part))


def warn_if_cut(eos: Eos, max_tokens: int | None, setting: str = "--max-tokens") -> None:
    """Say on stderr that an answer is not complete, and how to get more of it.

    Args:
        max_tokens: what the request asked for.
        setting: what the user changes for more.
    """
    if max_tokens is not None:
        reason = f"it was cut at {setting} {max_tokens}; a larger number gives more"
    else:
        reason = (
            f"it was cut after {eos.usage.completion_tokens} tokens, all that the daemon gives by default; with "
            f"{setting} and a larger number, the daemon gives more or says what limits it"
        )
    _warn_if_cut(eos, reason)


def warn_if_cut_elsewhere(eos: Eos) -> None:
    """``warn_if_cut`` for an answer that another command asked for, so that nobody knows here what limited it."""
    reason = f"it was cut after {eos.usage.completion_tokens} tokens; a larger --max-tokens of uma-trio ask gives more"
    _warn_if_cut(eos, f"{reason}, or says what limits it")


def _warn_if_cut(eos: Eos, reason: str) -> None:
    if eos.reason == "length":
        name = "the answer" if eos.index is None else f"answer {eos.index}"
        note(f"{name} is not complete: {reason}")


def warn_if_in_memory(eos: Eos) -> None:
    """Say on stderr that a session is not on disk.  One without turns is not kept at all."""
    if eos.session is not None and eos.session.turns and not eos.session.durable:
        note("this session is in memory only and ends with the daemon; see its log")
