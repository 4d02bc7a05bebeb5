"""Parts of rules in llguidance's Lark."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from uma_trio.grammar.closed_objects import close_objects

_CONTROL: Final = re.compile("([\ud800-\udfff])")


def has_control(text: str) -> bool:
    """Whether a character of ``text`` stands for a control token."""
    return _CONTROL.search(text) is not None


def up_to_control(text: str) -> tuple[str, str]:
    """``text`` in front of its first control token, and from there on."""
    control = _CONTROL.search(text)
    return (text, "") if control is None else (text[: control.start()], text[control.start() :])


def literal(text: str, controls: Mapping[str, int], *, loose: bool = False) -> str:
    """``text`` as an expression; empty for an empty text.

    Args:
        controls: characters that stand for control tokens, with their ids.
        loose: line breaks may be left out.
    """
    parts = filter(None, re.split("(\n)", text) if loose else [text])
    return " ".join(
        '"\\n"?' if loose and part == "\n" else f"<[{controls[run]}]>" if run in controls else quoted(run)
        for part in parts
        for run in filter(None, _CONTROL.split(part))
    )


def quoted(text: str) -> str:
    """``text``, which has no control tokens, as an expression."""
    return json.dumps(text, ensure_ascii=False)


JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One space after commas and colons, as most JSON in training texts has it, and no other whitespace between tokens: a
small model would write line breaks for ever."""

MAX_REMEMBERED_BYTES: Final = 1 << 15
"""Longer schemas are not remembered."""


def json_expression(schema: dict[str, Any]) -> str:
    """JSON that ``schema`` describes.  Objects have the properties that the schema names, and others only if the schema asks for them.

    Raises:
        ValueError: the schema is not JSON.
    """
    try:
        text = msgspec.json.encode(schema)
        return (_remembered_expression if len(text) <= MAX_REMEMBERED_BYTES else _expression)(text)
    except (RecursionError, msgspec.MsgspecError, TypeError) as error:
        raise ValueError(str(error)) from None


def _expression(text: bytes) -> str:
    schema = close_objects(msgspec.json.decode(text))
    return f"%json {msgspec.json.encode({**schema, 'x-guidance': JSON_STYLE}).decode()}"


_remembered_expression = functools.lru_cache(maxsize=128)(_expression)
"""Clients send the same schemas and tools with each request, and closing 50 properties takes a millisecond."""
