"""Types of fields that messages of several modules have, with their bounds."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from uma_trio.protocol.parameters import MAX_INT32

MAX_NAME_CHARS: Final = 256
"""Characters of a name that a client chooses: of a request, a session, a model or a principal."""

MAX_ERROR_CHARS: Final = 300
"""Length of an error message about a field.  Such a message may quote what the client sent."""

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1 << 20)]
PromptTokens = Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 20)]
