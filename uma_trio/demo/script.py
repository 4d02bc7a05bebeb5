"""The demo's script: three short chats, and a long document with a question at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from uma_trio.demo.recording import Question, Stream

DOCUMENT: Final = Path(__file__).with_name("document.md")
"""About 4,000 tokens of the embedded model: ``make_document(seed=1, facts=300)`` of ``uma_trio.training``.  A file,
because the training scripts are not in the wheel."""

HEAD_START: Final = 30
"""Tokens that each chat has when the document arrives, so that all chats are streaming by then."""

_COUNTS = ("Count from 1 to 120",)
_TALES = tuple(
    f"Tell me a story about {animal} named {name}"
    for animal, name in (
        ("a fox", "Ada"), ("a bear", "Bo"), ("a dog", "Max"), ("a cat", "Lily"), ("an owl", "Ivo"), ("a wolf", "Nora"),
    )
)  # fmt: skip
_THIS_AND_THAT = (
    "Who are you?",
    "What is the capital of France?",
    "Spell elephant",
    "What is 123 + 456?",
    "What day comes after Monday?",
    "Count from 200 to 280",
)


def streams() -> tuple[Stream, ...]:
    """Return the script's streams, the same each time."""
    return (
        *(
            Stream(name=f"chat {number}", questions=tuple(Question(text=text) for text in texts))
            for number, texts in enumerate((_COUNTS, _TALES, _THIS_AND_THAT), 1)
        ),
        Stream(name="document", questions=(Question(text=_document()),), interactive=False),
    )


def _document() -> str:
    return f"{DOCUMENT.read_text()}\nSummarise the document."
