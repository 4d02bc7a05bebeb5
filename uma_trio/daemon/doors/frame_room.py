"""Memory for large frames of all connections: each has its room from its first bytes to the end of its request."""

from __future__ import annotations

from collections import Counter
from typing import Final

import attrs
import psutil

from uma_trio.errors import QueueFull
from uma_trio.protocol.peer import OWN_PRINCIPAL

FREE_BYTES: Final = 2 << 20
"""A frame up to this size needs no room: ``max_connections`` bounds how many there are."""
SHARE_OF_MEMORY: Final = 16
LEAST_FRAMES: Final = 4
"""Frames of the largest size for which there is room on any machine."""
RETRY_MS: Final = 1000


def room_bytes(max_frame_bytes: int) -> int:
    """Room of a daemon on this machine."""
    return max(LEAST_FRAMES * max_frame_bytes, psutil.virtual_memory().total // SHARE_OF_MEMORY)


@attrs.define
class FrameRoom:
    """The room of all connections.

    Args:
        max_bytes: of all large frames together.
    """

    max_bytes: int
    _taken: Counter[str] = attrs.field(init=False, factory=Counter)
    """By principal."""

    def take(self, principal: str, n_bytes: int) -> None:
        """Take room.  A principal gets it only if as much is free afterwards as it has; the daemon's own user gets all.

        Raises:
            QueueFull: there is none.
        """
        free = self.max_bytes - self._taken.total() - n_bytes
        if free < (0 if principal == OWN_PRINCIPAL else self._taken[principal]):
            message = "too many large messages arrive at once, or wait for their answers"
            raise QueueFull(message, retry_after_ms=RETRY_MS)
        self._taken[principal] += n_bytes

    def give_back(self, principal: str, n_bytes: int) -> None:
        """Give back what ``take`` has taken."""
        self._taken[principal] -= n_bytes
        self._taken += Counter()  # drops those that have nothing


class HeldFrames:
    """What one connection has of the room: for the frame that arrives, and for the one whose request runs."""

    def __init__(self, room: FrameRoom, principal: str) -> None:
        self._room = room
        self._principal = principal
        self._arriving = 0
        self._running = 0

    def arrive(self, n_bytes: int) -> None:
        """A frame of ``n_bytes`` arrives; calls for the same frame add nothing.

        Raises:
            QueueFull: there is no room.
        """
        if n_bytes > max(self._arriving, FREE_BYTES):
            self._room.take(self._principal, n_bytes - self._arriving)
            self._arriving = n_bytes

    def handled(self, *, runs: bool) -> None:
        """The frame is decoded; ``runs`` says whether it is a request that runs from now on."""
        if runs:
            self._running, self._arriving = self._arriving, 0
        else:
            self._release(self._arriving)
            self._arriving = 0

    def ended(self) -> None:
        """The request has ended."""
        self._release(self._running)
        self._running = 0

    def close(self) -> None:
        """Give back everything."""
        self.handled(runs=False)
        self.ended()

    def _release(self, n_bytes: int) -> None:
        if n_bytes:
            self._room.give_back(self._principal, n_bytes)
