"""Streams of chat completions that a client can go on reading on another connection.

With ``stream_options: {"resumable": true}`` the answer is a detached one of the daemon, and each chunk has an id.  A client
whose connection was lost sends its request again, with the last id that it has got as ``Last-Event-ID``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import attrs

from uma_trio.client import Event
from uma_trio.gateway.answer import Renderer
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.protocol.parameters import MAX_INT32

_EVENT_ID: Final = re.compile(r"([!-9;-~]{1,256}):(\d{1,10})")


@attrs.frozen
class ReadPosition:
    """Where a client has read to."""

    answer_id: str
    number: int
    """The last event of the daemon that it has; 0 after the chunk with the role."""

    @classmethod
    def of(cls, event_id: str) -> ReadPosition:
        """Read an id of a chunk.

        Raises:
            HttpError: it is not such an id.
        """
        match = _EVENT_ID.fullmatch(event_id)
        if match is None or int(match[2]) > MAX_INT32:
            message = "Last-Event-ID is the id of a chunk of a resumable stream, such as 4f1c:12"
            raise invalid(message, parameter="Last-Event-ID")
        return cls(match[1], int(match[2]))


def last_position(headers: Mapping[str, str]) -> ReadPosition | None:
    """Where the client has read to, if it goes on.

    Raises:
        HttpError: its ``Last-Event-ID`` is not the id of a chunk.
    """
    event_id = headers.get("last-event-id")
    return ReadPosition.of(event_id) if event_id else None


class ResumableChunks(Renderer[Event]):
    """Gives ids to the chunks that ``inner`` writes, and leaves out those that the client has.

    Args:
        after: number of the last one that it has; -1: none.
    """

    def __init__(self, inner: Renderer[Event], answer_id: str, after: int = -1) -> None:
        self.media_type, self.keep_alive_frame = inner.media_type, inner.keep_alive_frame
        self._inner = inner
        self._answer_id = answer_id
        self._after = after

    def begin(self) -> bytes:
        """The chunk with the role, number 0."""
        return b"" if self._after >= 0 else self._number(self._inner.begin(), 0)

    def render(self, event: Event) -> bytes:
        """The chunk of one event; events without a number come before the first token."""
        data, number = self._inner.render(event), getattr(event, "number", None)
        if number is None:
            return data
        return self._number(data, number) if number > self._after else b""

    def fail(self, error: HttpError) -> bytes:
        """An error after the beginning: the connection to the answer, or the answer, has ended."""
        return self._inner.fail(error)

    def end(self) -> bytes:
        """What comes after the last event, also for a client that has that."""
        return self._inner.end()

    def _number(self, data: bytes, number: int) -> bytes:
        return b"id: %s:%d\n" % (self._answer_id.encode(), number) + data if data else b""
