"""What a user types while an answer is shown: changes of the answer, and the beginning of the next message.  Pure."""

from __future__ import annotations

import codecs
from typing import Any, Final

ENTER: Final = "\r\n"
BACKSPACE: Final = "\x7f\b"
END_OF_INPUT, CLEAR, ESCAPE = "\x04", "\x15", "\x1b"

CHANGES: Final = {
    "/stop": ("", "end the answer with its sentence"),
    "/answer": ("", "end the reasoning"),
    "/say": ("TEXT", "append TEXT to the answer, as if the model had written it"),
}
"""Commands while an answer is shown.  Others wait for its end, and a message interrupts it."""


def change_of(line: str) -> dict[str, Any] | None:
    """Fields of the steer query that ``line`` stands for; ``None`` if there is no such command."""
    name, _, argument = line.partition(" ")
    match name:
        case "/stop":
            return {"stop": "sentence"}
        case "/answer":
            return {"end_reasoning": True}
        case "/say" if argument:
            return {"text": argument}
    if line.startswith("//"):
        return {"message": line[1:]}
    return None if line.startswith("/") else {"message": line}


class TypeAhead:
    """Lines of keys that nobody has echoed.  Keys that edit a line otherwise, such as arrows, have no effect."""

    def __init__(self) -> None:
        self.text = ""
        """The line that is not complete."""
        self.has_ended = False
        """Whether Ctrl-D was pressed on an empty line."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_escape = False

    def feed(self, data: bytes) -> list[str]:
        """Add keys; returns the lines that they complete, without empty ones."""
        lines = []
        for key in self._decoder.decode(data):
            if self._in_escape:  # ESC, perhaps [ or O, parameters, and a letter or ~
                self._in_escape = key in "[O;" or key.isdigit()
            elif key in ENTER:
                lines.append(self.take())
            elif key in BACKSPACE:
                self.text = self.text[:-1]
            elif key == CLEAR:
                self.text = ""
            elif key == END_OF_INPUT:
                self.has_ended = self.has_ended or not self.text
            elif key == ESCAPE:
                self._in_escape = True
            elif key.isprintable():
                self.text += key
        return [line for typed in lines if (line := typed.strip())]

    def take(self) -> str:
        """The line so far; the next one begins."""
        text, self.text = self.text, ""
        return text
