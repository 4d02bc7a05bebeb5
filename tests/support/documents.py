"""What the documents and the help texts tell people to type."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

import uma_trio
from uma_trio.cli import COMMANDS

ROOT = Path(uma_trio.__file__).parent.parent


def fenced(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page, each with its language, which may be empty."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [block for found, block in fenced(text) if found == language]


def section(page: str, title: str) -> str:
    """The text under a heading, up to the next heading of its level or above."""
    level = re.search(rf"^(#+) {re.escape(title)}$", page, re.MULTILINE)
    assert level, f"no heading {title!r}"
    rest = page[level.end() :]
    end = re.search(rf"^#{{1,{len(level[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def tables(text: str) -> list[list[list[str]]]:
    """All tables, each as a list of rows without the header."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split(" |")] for line in block.splitlines()]
        found.append([[cell.removeprefix("|").strip() for cell in row] for row in rows[2:]])
    return found


def commands(block: str) -> list[str]:
    """The command lines of a block, without comments."""
    lines = (re.sub(r"\s+# .*", "", line).strip() for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def help_texts() -> Iterator[tuple[str, str]]:
    """The help text of each command and subcommand, as it is in the source, with its name."""
    for name in COMMANDS:
        command = importlib.import_module(f"uma_trio.cli.{name}").command
        for each in (command, *getattr(command, "commands", {}).values()):
            assert isinstance(each, click.Command)
            yield (
                f"uma-trio {name}" if each is command else f"uma-trio {name} {each.name}",
                inspect.cleandoc(each.help or ""),
            )


def help_examples(text: str) -> list[str]:
    """The command lines of a help text: indented, in a paragraph that click does not wrap."""
    found = []
    for paragraph in re.findall(r"^\x08\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL):
        for line in paragraph.splitlines():
            match = re.match(r" +(?:[a-z]+ {2,})?(\S.*?)(?: {2,}[a-z].*)?$", line)
            if match and re.search(r"(^|\| )uma-trio ", match[1]):
                found.append(match[1])
    return found
