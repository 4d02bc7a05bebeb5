"""What steps and copies of KV states take on this machine, as learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from uma_trio.daemon.policy.cost import CostModel, Work
from uma_trio.daemon.policy.tick import estimated_work
from uma_trio.daemon.policy.view import SequenceView
from uma_trio.engine_link.attention import Attention

FIRST_BYTES_PER_MS: Final = {"save": 2e6, "load": 1e7, "read": 1e7}
"""Copy rates that are assumed until there are measurements."""

LEARN_FROM_BYTES: Final = 4_000_000
"""In a smaller copy most of the time is overhead, so it says little about the rate."""

RATE_WEIGHT: Final = 0.3
"""Weight of the latest copy in the rate."""

GAP_WEIGHT: Final = 0.05
"""Weight of the latest gap between two steps in their mean."""

MAX_GAP_FACTOR: Final = 3.0
"""A gap counts as this many times the mean at most, so that a hiccup does not count for long."""

LEARN_EVERY_MS: Final = 3.0
"""Steps with the same decodes and no prefill are skipped until they have taken so long together, and then one is learned.  What a
device takes does not change faster, and to learn from a step takes the daemon 0.04 ms."""

OVERHEAD_MS: Final = 3.0
"""Fixed cost of loading a state, whatever its size."""


COPY_MARGIN: Final = 1.5
"""A copy has to be this many times faster: all streams wait for it, while prefill takes the time that they leave."""

LONG_PREFILL: Final = 2.0
"""How much longer than predicted a long prefill may take: after a start, the cost of long contexts is extrapolated from
short ones, while the cost of a copy is known well."""


class StepTimings:
    """What steps and copies of states take on this machine, as learned.

    Args:
        cost: what is known of steps at the start.
        n_batch: tokens of one call.
    """

    def __init__(self, cost: CostModel, n_batch: int) -> None:
        self.cost = cost
        self._others: dict[int, CostModel] = {}
        """What is known of steps with other numbers of threads than now."""
        self.gap_ms = 0.0
        """Mean time that the device waits between two steps."""
        self.attention = Attention()
        """What attention scans in the next step; ``StepPlanner`` keeps it up to date."""
        self._last_shape = (0, 0)
        """Calls and rows of the last step without prefill that was learned."""
        self._skipped_ms = 0.0
        """What steps took since then."""
        self._bytes_per_ms = dict(FIRST_BYTES_PER_MS)
        self._n_batch = n_batch

    def change_threads(self, before: int, now: int) -> None:
        """Steps are computed with ``now`` threads from now on.  The costs that were learned with as many threads return."""
        self._others[before] = self.cost
        self.cost = self._others.get(now, self.cost)

    def record_step(self, work: Work, ms: float, *, is_outlier: bool = True) -> None:
        """Learn from a step.

        Args:
            is_outlier: it was predicted badly.
        """
        if not work.prefill_tokens:
            shape = work.n_calls, work.decode_rows
            is_compared = work.decode_rows in self.cost.call_times.trials
            if shape == self._last_shape and not is_outlier and not is_compared:
                self._skipped_ms += ms
                if self._skipped_ms < LEARN_EVERY_MS:
                    return
            self._last_shape, self._skipped_ms = shape, 0.0
        self.cost = self.cost.observed(work, ms)

    def record_gap(self, ms: float) -> None:
        """Learn from the time that the device waited for a step."""
        self.gap_ms += GAP_WEIGHT * (min(ms, MAX_GAP_FACTOR * self.gap_ms + 1.0) - self.gap_ms)

    def record_copy(self, way: Literal["read", "load", "save"], n_bytes: int, ms: float) -> None:
        """Learn from a copy."""
        if n_bytes >= LEARN_FROM_BYTES:
            rate = n_bytes / max(ms, 1e-3)
            self._bytes_per_ms[way] += RATE_WEIGHT * (rate - self._bytes_per_ms[way])

    def decode_ms(self, decodes: Sequence[SequenceView]) -> float:
        """What a step of these alone is predicted to take."""
        return self.cost.predict(estimated_work(decodes, self.attention))

    def copy_ms(self, way: Literal["read", "load", "save"], n_bytes: int) -> float:
        """What a copy is predicted to take."""
        return n_bytes / self._bytes_per_ms[way]

    def worth_loading(self, n_tokens: int, n_bytes: int) -> bool:
        """Whether reading, verifying and loading a state is likely to be faster than computing ``n_tokens`` of it."""
        copy_ms = OVERHEAD_MS + self.copy_ms("read", n_bytes) + self.copy_ms("load", n_bytes)
        return copy_ms < LONG_PREFILL * self.prefill_ms(n_tokens)

    def worth_copying(self, n_tokens: int, *, copy_ms: float) -> bool:
        """Whether a copy that takes ``copy_ms`` is clearly faster than computing ``n_tokens`` more of a prompt."""
        return COPY_MARGIN * copy_ms < self.prefill_ms(n_tokens + 1) - self.prefill_ms(1)

    def prefill_ms(self, n_tokens: int) -> float:
        """Predicted duration of the prefill of the first ``n_tokens``, at least 1, of a prompt."""
        chunk = min(n_tokens, self._n_batch)
        return self.cost.predict(Work(chunk, 0, 0, mean_prefill_context=n_tokens / 2)) * n_tokens / chunk
