"""Where the messages of ``uma-trio chat`` come from: a terminal with line editing, or the lines of stdin."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import platformdirs
import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from uma_trio.cli.stdio import note, read_line, to_text
from uma_trio.cli.type_ahead import TypeAhead


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

    def hidden(self) -> contextlib.AbstractContextManager[None]:
        """What the user types between two messages does not appear in the answer."""

    def lines(self) -> AsyncIterator[str]:
        """Lines that the user types while an answer is shown.  What is not complete appears in the next message."""

    def give_back(self, line: str) -> None:
        """Let ``line`` appear in the next message."""


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

    def hidden(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def lines(self) -> AsyncIterator[str]:
        return
        yield

    def give_back(self, line: str) -> None:
        raise AssertionError("there are no such lines")


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

    def read(self) -> str:
        if self._ahead.has_ended:
            raise EOFError
        try:
            return self._session.prompt("> ", default=self._ahead.take())
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._session.default_buffer.text) from None

    def edit(self, text: str) -> str:
        return self._session.prompt("> ", default=text)

    def confirm(self, question: str) -> bool:
        try:
            answer: str = PromptSession[str](history=InMemoryHistory(), output=self._session.output).prompt(
                f"{question} [y/N] "
            )
        except (KeyboardInterrupt, EOFError):
            return False
        return answer.strip().lower() in ("y", "yes")

    async def lines(self) -> AsyncIterator[str]:
        fd = sys.stdin.fileno()
        while True:
            await trio.lowlevel.wait_readable(fd)
            for line in self._ahead.feed(os.read(fd, 4096)):
                yield line

    def give_back(self, line: str) -> None:
        self._ahead.text = f"{line} {self._ahead.text}".strip()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        quiet = termios.tcgetattr(fd)
        quiet[0] &= ~termios.ICRNL  # so Enter and Ctrl-D reach the next prompt as the keys that they are
        quiet[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


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
    path = Path(platformdirs.user_state_dir("uma-trio")) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
