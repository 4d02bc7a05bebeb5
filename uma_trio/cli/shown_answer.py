"""An answer of ``uma-trio chat`` while it is written: its text, and the notices about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from uma_trio.cli.answer import ReasoningPrinter, printable
from uma_trio.cli.answer_view import AnswerView
from uma_trio.cli.conversation import Message
from uma_trio.cli.stdio import note
from uma_trio.client import Event, Inserted, Reasoning, Token

_WORD_END: Final = re.compile(r"[\s\u3000-\u303f\uff00-\uff65]")
"""White space, and the punctuation of languages that write without it."""


class ShownAnswer:
    """Shows the events of an answer, and notices that come between two words of it.

    Args:
        messages: one of the model without text, to which the answer is added.  Messages that interrupt it follow, and
            what answers them.
        show_reasoning: as in ``ReasoningPrinter``.
    """

    def __init__(self, view: AnswerView, messages: list[Message], *, show_reasoning: bool | None) -> None:
        self._view = view
        self._messages = messages
        self._reasoning = ReasoningPrinter(shown=show_reasoning)
        self._is_in_word = False
        self._waiting: list[tuple[str, str | None]] = []
        """Notices that come when the word is complete, with their colours."""

    def show(self, event: Event) -> None:
        """Show the text of ``event``, if it has any."""
        last = self._messages[-1]
        if isinstance(event, Reasoning):
            if not self._reasoning.is_open:
                self._say()
            self._write(event.text, self._reasoning.feed)
            self._is_in_word = self._is_in_word and self._reasoning.is_open  # otherwise it is hidden
            last["reasoning"] = last.get("reasoning", "") + event.text
        elif isinstance(event, Token) and event.text:
            if self._reasoning.is_open:
                self._say()
            self._write(event.text, self._view.feed)
            last["content"] += event.text
        elif isinstance(event, Inserted) and event.insertion.kind == "message":
            self._say()
            note(f"> {printable(event.insertion.text)}")
            self._messages.append({"role": "user", "content": event.insertion.text})
            self._messages.append({"role": "assistant", "content": ""})

    def notify(self, text: str, colour: str | None = None) -> None:
        """Tell the user something, after the word that is being written."""
        self._waiting.append((text, colour))
        if not self._is_in_word:
            self._say()

    def close(self) -> None:
        """End what is shown: the answer is complete, so notices about its end are late."""
        self._reasoning.close()

    def _write(self, text: str, feed: Callable[[str], None]) -> None:
        if self._waiting and (word_end := _WORD_END.search(text)):
            feed(text[: word_end.end()])
            self._say()
            text = text[word_end.end() :]
        if text:
            feed(text)
            self._is_in_word = not _WORD_END.match(text[-1])

    def _say(self) -> None:
        """End the line, and show the notices that wait."""
        self._reasoning.close()
        self._view.finish()
        self._is_in_word = False
        for text, colour in self._waiting:
            note(text, colour)
        self._waiting.clear()
