"""Shows the answers of a controller: the text as it comes, and as a tree when there are several."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from uma_trio.cli.answer import printable

if TYPE_CHECKING:
    from uma_trio.client import Event
    from uma_trio.protocol.answer_tree import AnswerTree, ControlledAnswer, Segment

MAX_LINE_CHARACTERS = 200
"""Longest text in the tree; a longer one is cut in the middle."""


class RunPrinter:
    """Prints the events of a request with a controller.

    The text of a single answer comes as it is generated; removed text stays, and an arrow says that it is gone.  With a
    fork, what follows it comes at the end, as a tree.

    Args:
        show_logs: print on stderr what the controllers print.
    """

    def __init__(self, *, show_logs: bool) -> None:
        from uma_trio.protocol.answer_tree import AnswerTree

        self.tree: AnswerTree = AnswerTree()
        self._show_logs = show_logs
        self._last_character = ""
        self._shown = ""
        """Text of the first answer when it forked, which has been printed by then."""

    @property
    def is_tree(self) -> bool:
        """Whether there is more than one answer."""
        return len(self.tree) > 1

    def print(self, event: Event) -> None:
        """Take note of an event, and print what it adds."""
        from uma_trio.client import Backtrack, ControllerOutput, Fork, Token

        if isinstance(event, Fork) and not self.is_tree and len(self.tree):
            self._shown = self.tree[0].text
        self.tree.add(event)
        match event:
            case Token() if not self.is_tree:
                self._echo(event.text)
            case Backtrack() if not self.is_tree:
                self._echo(" ↩ ")
            case ControllerOutput() if self._show_logs and event.logs:
                if self._last_character not in ("", "\n") and _are_one_stream():
                    self._echo("\n")
                for line in printable(event.logs).splitlines():
                    click.secho(f"[{event.index}] {line}", err=True, dim=True)

    def end(self) -> None:
        """Print the tree, if there is one, and say on stderr what went wrong."""
        if self._last_character not in ("", "\n"):
            click.echo()
        if self.is_tree:
            lines = tree_lines(self.tree)
            if self._shown and self.tree.segments().text == self._shown:
                next(lines)  # it stands there already
            for line in lines:
                click.echo(line, color=True)
        for answer in self.tree:
            if (problem := problem_of(answer)) is not None:
                click.echo(f"answer {answer.index} {problem}", err=True)

    def _echo(self, text: str) -> None:
        if text:
            self._last_character = text[-1]
            click.echo(printable(text) if sys.stdout.isatty() else text, nl=False, color=True)


def _are_one_stream() -> bool:
    """Whether stdout and stderr go to the same place: a terminal, or one file or pipe, as with 2>&1."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError):  # no files, as in a test
        return False


def problem_of(answer: ControlledAnswer) -> str | None:
    """What is wrong with an answer that has not ended as its controller wanted, as the end of a sentence."""
    if answer.failure is not None:
        return f"failed: {printable(answer.failure.message)}"
    if answer.eos is None or answer.eos.reason in ("stop", "cancelled"):
        return None
    if answer.eos.reason == "deadlock":
        names = ", ".join(answer.eos.waits_for or ["a variable"])
        return printable(f"waited for {names}, which nobody can write any more")
    return "was cut: --max-tokens, or the context, allows no more tokens"


def tree_lines(tree: AnswerTree) -> Iterator[str]:
    """The texts as a tree: each line is what some answers have in common, or the rest of one with its index."""
    return _lines(tree.segments(), "", "")


def _lines(segment: Segment, first: str, rest: str) -> Iterator[str]:
    name = "" if segment.answer is None else f"[{segment.answer.index}] "
    yield f"{first}{name}{_one_line(segment.text)}"
    for n, child in enumerate(segment.children, 1):
        is_last = n == len(segment.children)
        yield from _lines(child, rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  "))


def _one_line(text: str) -> str:
    shown = printable(text).replace("\n", "⏎").replace("\t", " ")
    if len(shown) <= MAX_LINE_CHARACTERS:
        return shown
    half = MAX_LINE_CHARACTERS // 2
    return f"{shown[:half]} … {shown[-half:]}"
