"""Where the messages of ``uma-trio chat`` come from: a terminal with line editing, or the lines of stdin."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from uma_trio.cli.stdio import note, read_line, to_text
from uma_trio.cli.type_ahead import CHANGES, TypeAhead
from uma_trio.files import state_folder

YES, NO = ("y", "yes"), ("n", "no")


class Input(Protocol):
    """Reads messages and commands."""

    def read(self) -> str:
        """Wait for the next message.

        Raises:
            EOFError: there are no more.
            KeyboardInterrupt: the user pressed Ctrl-C.  Its argument is what had been typed.
        """

    def edit(self, text: str) -> str:
        """Let the user edit a text.  Raises as ``read``."""

    def confirm(self, question: str) -> bool:
        """Ask the user yes or no; where there is nobody, the answer is no."""

    def lines(self) -> AsyncIterator[str]:
        """Lines that the user types while an answer is shown.  What is not complete appears in the next message."""

    def keep(self, line: str) -> None:
        """Read ``line`` after the answer, in the order of these calls."""

    @property
    def keeps(self) -> bool:
        """Whether there are lines to be read after the answer."""


class LineInput:
    """Each line of stdin is one message."""

    def read(self) -> str:
        line = read_line()
        if not line:
            raise EOFError
        return to_text(line)

    def edit(self, text: str) -> str:
        return self.read()

    def confirm(self, question: str) -> bool:
        note(question.partition(". ")[0])
        return False

    async def lines(self) -> AsyncIterator[str]:
        return
        yield  # an iterator without elements

    def keep(self, line: str) -> None:
        raise AssertionError("there are no such lines")

    @property
    def keeps(self) -> bool:
        return False


class TerminalInput:
    """A prompt with line editing, a history that is kept in a file, and completion of commands.

    Enter sends the message.  Alt-Enter, and Enter after a backslash, begin another line.
    """

    def __init__(self, commands: Sequence[str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            multiline=True,
            key_bindings=_key_bindings(),
            prompt_continuation="… ",
            completer=WordCompleter([*commands], sentence=True),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            output=create_output(always_prefer_tty=True),
        )
        self._ahead = TypeAhead()
        self._kept: deque[str] = deque()
        self._fresh: deque[str] = deque()
        """Lines typed during an answer that ``lines`` has not handed out.  Once it has ended, ``CHANGES`` among them are dropped."""

    def read(self) -> str:
        self._kept += [line for line in self._fresh if line.partition(" ")[0] not in CHANGES]
        self._fresh.clear()
        if self._kept:
            line = self._kept.popleft()
            self._session.history.append_string(line)
            note(f"> {line}")
            return line
        if self._ahead.has_ended:
            raise EOFError
        try:
            return self._session.prompt("> ", default=self._ahead.take())
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._session.default_buffer.text) from None

    def edit(self, text: str) -> str:
        return self._session.prompt("> ", default=text)

    def confirm(self, question: str) -> bool:
        if self._kept and self._kept[0].lower() in (*YES, *NO):
            answer = self._kept.popleft()
            note(f"{question} [y/N] {answer}")
            return answer.lower() in YES
        try:
            answer = PromptSession[str](history=InMemoryHistory(), output=self._session.output).prompt(
                f"{question} [y/N] "
            )
        except (KeyboardInterrupt, EOFError):
            return False
        return answer.strip().lower() in YES

    async def lines(self) -> AsyncIterator[str]:
        fd = sys.stdin.fileno()
        after_enter = "".join(key.data for key in get_typeahead(self._session.input))
        self._kept += self._ahead.feed(after_enter.encode())  # typed before the answer, so no part of it
        while True:
            while self._fresh:
                yield self._fresh[0]
                self._fresh.popleft()  # not before: the answer can end while the line takes effect
            await trio.lowlevel.wait_readable(fd)
            self._fresh += self._ahead.feed(os.read(fd, 4096))

    def keep(self, line: str) -> None:
        self._kept.append(line)

    @property
    def keeps(self) -> bool:
        return bool(self._kept)


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history() -> History:
    """The history file, which only its owner can read; in memory if there is no place for a file."""
    path = state_folder() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
