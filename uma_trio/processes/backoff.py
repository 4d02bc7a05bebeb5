"""How long to wait before a process that keeps dying is started again."""

from __future__ import annotations

import attrs


@attrs.define
class Backoff:
    """The wait before the next start.  It doubles from one failure to the next."""

    first_s: float = 0.25
    max_s: float = 30.0
    wait_s: float = 0.0

    def after(self, *, worked: bool) -> float:
        """The wait after one more process has ended; none if it has worked before."""
        self.wait_s = 0.0 if worked else min(max(2 * self.wait_s, self.first_s), self.max_s)
        return self.wait_s
