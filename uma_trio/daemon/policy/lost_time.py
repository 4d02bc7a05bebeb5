"""How much of their time background answers may lose to requests that do not wait for their step."""

from __future__ import annotations

from typing import Final

import attrs

MAX_LOST_SHARE: Final = 0.1
"""What interrupted steps have computed takes at most this share of the time of the other steps."""

MAX_SAVED_MS: Final = 500.0
"""Time that was not lost counts later, up to this much: the first requests after a while interrupt whatever computes."""


@attrs.define
class LostTime:
    """Decides whether a step is interrupted.  So background answers come to an end, however often others come."""

    _left_ms: float = MAX_SAVED_MS

    def completed(self, ms: float) -> None:
        """A step that could have been interrupted took ``ms``."""
        self._left_ms = min(MAX_SAVED_MS, self._left_ms + MAX_LOST_SHARE * ms)

    def may_lose(self, ms: float) -> bool:
        """Whether a step may be interrupted that has computed for ``ms``."""
        return ms <= self._left_ms

    def interrupted(self, ms: float) -> None:
        """A step was interrupted after ``ms``."""
        self._left_ms -= ms
