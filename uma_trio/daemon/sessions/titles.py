"""Titles that nobody has given: the first words of the first question.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from uma_trio.protocol.chat import ChatMessage
from uma_trio.protocol.types import CONTROL

TITLE_CHARS: Final = 80
"""Longest title."""

# A file that the chat page has put before a question: see `fenced` of gateway/chat/files.js.
_FILE = re.compile(r"\n*([^\n]+\.\w{1,9}):\n\n(`{3,})\n")
# Marks of Markdown: at the beginning of a line, a fence, around words.
_MARKS = re.compile(
    r"^[ \t]*(?:#{1,6}|>|[-*])[ \t]+|^[ \t]*`{3,}\S*$|(?<!\w)(\*{1,3}|~~|`+)(?=\S)(.+?)(?<=\S)\1(?!\w)", re.MULTILINE
)
_CONTROL = re.compile(f"[{CONTROL}]")


def own_title(messages: Sequence[ChatMessage]) -> str:
    """The first words of the first message of the user, on one line; the name of its file without words of its own."""
    question = next((message.text for message in messages if message.role == "user"), "")
    begin, name = _after_files(question)
    words = _MARKS.sub(lambda mark: mark[2] or "", question[begin : begin + 4 * TITLE_CHARS])
    return (" ".join(_CONTROL.sub(" ", words).split()) or _CONTROL.sub(" ", name))[:TITLE_CHARS].rstrip()


def _after_files(question: str) -> tuple[int, str]:
    """Where the text after the files of ``question`` begins, and the name of the first file."""
    at, name = 0, ""
    while (begin := _FILE.match(question, at)) is not None:
        end = question.find("\n" + begin[2], begin.end())
        if end < 0:
            break
        name = name or begin[1]
        at = end + 1 + len(begin[2])
    return at, name
