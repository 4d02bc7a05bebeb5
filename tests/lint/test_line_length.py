"""Lines of prose in the documents have at most 120 characters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import uma_trio

ROOT = Path(uma_trio.__file__).parent.parent

MAX_CHARACTERS = 120

FENCE = re.compile(r"\s*(```|~~~)")
UNBREAKABLE = re.compile(r"\s*(\||#{1,6} )")
"""Begins a row of a table or a heading."""
MARKER = re.compile(r"\s*(?:[-*+] +|\d+\. +|> ?)*")
"""Begins an item of a list or a quotation."""


def documents() -> list[Path]:
    return sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def long_lines(text: str) -> list[int]:
    """Numbers of the lines that are too long, without those in code blocks and those that cannot be broken."""
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            in_code = not in_code
        elif len(line) > MAX_CHARACTERS and not in_code and not UNBREAKABLE.match(line):
            marker = MARKER.match(line)
            start = marker.end() if marker else 0
            if " " in line[start : MAX_CHARACTERS + 1]:
                found.append(number)
    return found


def test_lines_of_the_documents_are_not_too_long() -> None:
    found = [
        f"{page.relative_to(ROOT)}:{number} has more than {MAX_CHARACTERS} characters"
        for page in documents()
        for number in long_lines(page.read_text())
    ]
    assert not found, "\n".join(found)


LONG = "word " * 30
LINK = f"[link](https://example.com/{'x' * 120})"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("word " * 23 + "words", []),
        ("word " * 23 + "longer words", [1]),
        (f"one\n\n{LONG}\n", [3]),
        (f"- {LONG}", [1]),
        (f"  1. {LINK}", []),
        (LINK, []),
        (f"see {LINK}", [1]),
        (f"| {LONG} |\n## {LONG}\n```sh\n{LONG}\n```\n{LONG}", [6]),
        (f"  ```\n  {LONG}\n  ```", []),
    ],
)
def test_long_lines(text: str, found: list[int]) -> None:
    assert long_lines(text) == found
