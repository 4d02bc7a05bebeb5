"""Uploads of controllers that arrive in parts, within bounds of size for each and for all together."""

from __future__ import annotations

from typing import Final

import attrs

from uma_trio.errors import BadRequest, QueueFull
from uma_trio.protocol.controllers import ControllersQuery

MAX_INCOMPLETE: Final = 4
"""Modules of the largest size that may be in memory before they are complete.  Smaller ones may be more."""
BUSY_RETRY_MS: Final = 1000


@attrs.define
class Uploads:
    """The unfinished uploads of all connections."""

    max_bytes: int
    """Size of the largest module."""
    incomplete_bytes: int = 0


class Upload:
    """The unfinished upload of one connection."""

    def __init__(self, all_uploads: Uploads) -> None:
        self._all = all_uploads
        self._of = 0
        self._n_parts = 0
        self._received = bytearray()

    @property
    def received_bytes(self) -> int:
        """Size of what has arrived."""
        return len(self._received)

    def add(self, query: ControllersQuery) -> bytearray | None:
        """Take the next part; returns the whole module with its last part.

        Raises:
            BadRequest: it is not the next part, or the module is too large.
            QueueFull: too many uploads are unfinished.
        """
        assert query.binary is not None
        if query.part == 0:
            self.drop()
            self._of = query.of
        elif (query.part, query.of) != (self._n_parts, self._of):
            expected = f"part {self._n_parts} of {self._of}" if self._n_parts else "part 0"
            self.drop()
            raise BadRequest(
                f"this is part {query.part} of {query.of}, but {expected} comes next; begin with part 0", field="part"
            )
        size = len(query.binary)
        if self.received_bytes + size > self._all.max_bytes:
            self.drop()
            raise BadRequest(
                f"a controller has at most {self._all.max_bytes:,} bytes here (max_controller_bytes)", field="binary"
            )
        if self._all.incomplete_bytes + size > MAX_INCOMPLETE * self._all.max_bytes:
            self.drop()
            raise QueueFull("too many controllers are being uploaded; try again", retry_after_ms=BUSY_RETRY_MS)
        self._all.incomplete_bytes += size
        self._received += query.binary  # grows in place: a join of all parts would hold the event loop
        self._n_parts += 1
        if self._n_parts < self._of:
            return None
        wasm = self._received
        self.drop()
        return wasm

    def drop(self) -> None:
        """Forget what has arrived."""
        self._all.incomplete_bytes -= self.received_bytes
        self._n_parts, self._received = 0, bytearray()
