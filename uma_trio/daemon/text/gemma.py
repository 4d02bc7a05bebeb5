"""The notation in which Gemma 4 writes arguments: like JSON, with bare keys, and strings between markers of its own."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

_BARE: Final = re.compile(r"[^\s,:{}\[\]]+")
_SPACES: Final = re.compile(r"\s*")


class InvalidNotation(ValueError):
    """The text is not in this notation."""


def decode_object(text: str, quote: str) -> dict[str, Any]:
    """The object that ``text`` stands for.

    Args:
        quote: what stands on both sides of a string.

    Raises:
        InvalidNotation: it is not an object.
    """
    try:
        value, end = _value(text, 0, quote)
    except (IndexError, RecursionError):
        raise InvalidNotation("it ends too early, or is nested too deeply") from None
    if end != len(text) or not isinstance(value, dict):
        raise InvalidNotation("it is not an object")
    return value


def _value(text: str, at: int, quote: str) -> tuple[Any, int]:
    at = _after_spaces(text, at)
    if text[at] == "{":
        return _container(text, at + 1, quote, "}")
    if text[at] == "[":
        return _container(text, at + 1, quote, "]")
    return _scalar(text, at, quote)


def _container(text: str, at: int, quote: str, end: str) -> tuple[Any, int]:
    items: list[Any] = []
    at = _after_spaces(text, at)
    while text[at] != end:
        key = None
        if end == "}":
            key, at = _scalar(text, at, quote, is_key=True)
            at = _after_spaces(text, at)
            if text[at] != ":":
                raise InvalidNotation("a key has no value")
            at += 1
        value, at = _value(text, at, quote)
        items.append((key, value) if end == "}" else value)
        at = _after_spaces(text, at)
        if text[at] == ",":
            at = _after_spaces(text, at + 1)
        elif text[at] != end:
            raise InvalidNotation("a comma is missing")
    return (dict(items) if end == "}" else items), at + 1


def _scalar(text: str, at: int, quote: str, *, is_key: bool = False) -> tuple[Any, int]:
    if text.startswith(quote, at):
        begin = at + len(quote)
        end = text.find(quote, begin)
        if end < 0:
            raise InvalidNotation("a string does not end")
        return text[begin:end], end + len(quote)
    match = _BARE.match(text, at)
    if match is None:
        raise InvalidNotation("a value is missing")
    if is_key:
        return match[0], match.end()
    try:
        return msgspec.json.decode(match[0]), match.end()
    except msgspec.MsgspecError:
        return match[0], match.end()  # a string without its marks


def _after_spaces(text: str, at: int) -> int:
    match = _SPACES.match(text, at)
    return at if match is None else match.end()
