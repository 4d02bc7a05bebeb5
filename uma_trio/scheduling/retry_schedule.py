"""When refused requests should be sent again: one after another, as fast as there will be room for them."""

from __future__ import annotations

import math
from typing import Final

import attrs

LONGEST_WAIT_S: Final = 60.0
"""Clients of OpenAI's API do not honour longer waits."""


@attrs.define
class RetrySchedule:
    """Gives each refused request a moment of its own.

    Without it, all that were refused together would come back together, and most of them would be refused again.
    """

    _last_s: float = -math.inf
    """The latest moment that a request was given."""

    def wait_s(self, now_s: float, first_s: float, interval_s: float) -> float:
        """How long the next refused request should wait.

        Args:
            first_s: time until there is room for the first one.
            interval_s: time between two requests that end.
        """
        at = min(max(now_s + first_s, self._last_s + interval_s), now_s + LONGEST_WAIT_S)
        self._last_s = at
        return at - now_s

    def clear(self) -> None:
        """Forget those that have not come back: there is room for everybody."""
        self._last_s = -math.inf
