"""Errors of settings, and how a value is shown in one."""

from __future__ import annotations

from typing import Final


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of bounds.  The message says where it was set."""


MAX_SHOWN: Final = 100
"""Characters of a value in an error."""


def shown(value: object) -> str:
    """Describe a value in an error: short, whatever its size is."""
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return "a number with many digits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def is_encodable(text: str, *, bytes_too: bool) -> bool:
    """Whether ``text`` can be encoded.

    Args:
        bytes_too: it may have bytes that are not UTF-8, which paths may have.
    """
    try:
        text.encode("utf-8", "surrogateescape" if bytes_too else "strict")
    except UnicodeEncodeError:
        return False
    return True
