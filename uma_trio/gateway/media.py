"""Pictures and sound in the contents of messages, as the socket protocol has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class MediaPart(dict[str, Any]):
    """A part of a content that is a picture or sound.

    Args:
        parameter: the field of the body that it comes from.
    """

    def __init__(self, parameter: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.parameter = parameter


class ToFetch(MediaPart):
    """A part of a content whose file the gateway still has to fetch.

    The type says so, and not a key: a client can send any key.
    """


def media_of(messages: Any) -> Iterator[tuple[str, MediaPart]]:
    """The pictures and the sound in the messages of a request for the daemon, each with its place there.

    Args:
        messages: what a client has sent, which need not be messages.
    """
    for n, message in enumerate(messages if isinstance(messages, Sequence) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for i, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, MediaPart):
                yield f"messages[{n}].content[{i}]", part
