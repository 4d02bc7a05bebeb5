"""Types of fields, and fields, that messages of several modules have, with their bounds."""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeGuard

import attrs
from msgspec import Meta

from uma_trio.protocol.parameters import MAX_INT32

MAX_NAME_CHARS: Final = 256
"""Characters of a name that a client chooses: of a request, a session, a model or a principal."""

MAX_ERROR_CHARS: Final = 300
"""Length of an error message about a field.  Such a message may quote what the client sent."""

MAX_TITLE: Final = 256
"""Characters of the title of a session, and of a text that is looked for."""

CONTROL: Final = r"\x00-\x1f\x7f-\x9f"
"""Control characters, within the brackets of a regular expression."""

ONE_LINE: Final = rf"^[^{CONTROL}]*\Z"
"""Texts that lists and logs show as they are, so they can neither end a line nor move the cursor of a terminal."""

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern=ONE_LINE)]
Title = Annotated[str, Meta(max_length=MAX_TITLE, pattern=ONE_LINE)]


def is_name(value: object) -> TypeGuard[str]:
    """Whether ``value`` is a ``Name``."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS and re.search(ONE_LINE, value) is not None


TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1 << 20)]
PromptTokens = Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 20)]


@attrs.frozen(kw_only=True)
class Question:
    """What every query has."""

    id: Name | None = None
    keep_alive: bool = False
    """Otherwise the daemon closes the connection after the answer."""
    principal: Name | None = None
    """On whose behalf the client asks.  Honoured only from the user that runs the daemon."""
