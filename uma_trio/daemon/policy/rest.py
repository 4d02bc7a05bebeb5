"""How long the device rests after a tick, so that it keeps a power limit."""

from __future__ import annotations

from typing import Final

import attrs

from uma_trio.config.power import PowerLimit, parse_power_limit

MIN_SHARE: Final = 0.05
"""The device works at least in this share of the time, also where resting takes more than the power that is allowed."""

MAX_SAVED_S: Final = 1.0
"""Power that was not used counts later, for at most this time: a short burst after a pause need not wait."""


@attrs.define
class Rest:
    """Chooses the pauses.  The same for all streams, so it changes nobody's share."""

    _limit: PowerLimit
    _saved_j: float = 0.0
    """Energy that may be used before it has to rest; negative: that it has used too much."""
    _since: float = 0.0
    """Up to when time and energy are counted."""

    def begin(self, now: float) -> None:
        """Count from ``now`` on: there was no work before."""
        self._since = now

    def after_tick(self, busy_s: float, now: float, taken_watts: float | None) -> float:
        """Seconds to rest.

        Args:
            busy_s: how long the device has computed.
            taken_watts: the power that it takes, in rests too; ``None``: nobody counts it, so it need not rest.  Ignored with a share.
        """
        elapsed_s, self._since = now - self._since, now
        longest_s = busy_s * (1 / MIN_SHARE - 1)
        if self._limit.share is not None:
            return min(longest_s, busy_s * (1 / self._limit.share - 1))
        watts = self._limit.watts or 1.0
        if taken_watts is None:
            return 0.0
        saved_j = self._saved_j + (watts - taken_watts) * elapsed_s
        self._saved_j = max(-watts * longest_s, min(watts * MAX_SAVED_S, saved_j))
        return max(0.0, -self._saved_j / watts)


def rest_of(limit: str | None, *, counts_energy: bool) -> Rest | None:
    """The pauses that ``power_limit`` asks for; ``None``: none, also because nothing counts the energy of a power."""
    power_limit = None if limit is None else parse_power_limit(limit)
    if power_limit is None or (power_limit.watts is not None and not counts_energy) or power_limit.share == 1:
        return None
    return Rest(power_limit)
