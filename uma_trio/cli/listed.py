"""What lists for people leave out: the stored responses of OpenAI's API, whose names nobody has chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import click

from uma_trio.cli.stdio import note

T = TypeVar("T")

STORED_RESPONSE: Final = re.compile(r"resp_[0-9a-f]{32}")
"""The name of a stored response, as an answer and as a session."""

all_option = click.option(
    "--all", "shows_all", is_flag=True, help="List stored responses of OpenAI's API (resp_...) as well."
)


def chosen_names(items: Sequence[T], name_of: Callable[[T], str], *, shows_all: bool) -> Sequence[T]:
    """``items`` without stored responses, whose number is printed to stderr; all with ``shows_all``."""
    if shows_all:
        return items
    shown = [item for item in items if not STORED_RESPONSE.fullmatch(name_of(item))]
    if n_hidden := len(items) - len(shown):
        note(f"not listed: {n_hidden:,} stored responses of OpenAI's API; --all lists them")
    return shown
