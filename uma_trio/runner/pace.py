"""How long steps and copies of states take here: what was learned, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from uma_trio.runner.job import Slot
from uma_trio.scheduling.cost import CostModel, Work

Way: TypeAlias = Literal["save", "load", "read"]
"""Of a state's bytes: out of the engine, into it, and from the disk, verified."""

FIRST_BYTES_A_MS: Final[dict[Way, float]] = {"save": 2e6, "load": 1e7, "read": 1e6}
"""What copying is believed to do before any was seen; reading, each thread that takes part."""

WEIGHT: Final = 0.3
"""Of the latest copy in the average."""

LEARN_FROM_BYTES: Final = 4_000_000
"""Of a smaller state most of the time is not that of its bytes."""

OVERHEAD_MS: Final = 3.0
"""Of loading a state, whatever its size."""


class Pace:
    """What one model's steps and copies take on this machine.

    Args:
        cost: what is known of steps at the start.
        n_batch: most tokens of one step.
        readers: threads that read one state together.
    """

    def __init__(self, cost: CostModel, n_batch: int, readers: int = 1) -> None:
        self.cost = cost
        """Of steps, as of now."""
        self.bytes_a_ms = {**FIRST_BYTES_A_MS, "read": readers * FIRST_BYTES_A_MS["read"]}
        self._n_batch = n_batch

    def stepped(self, work: Work, ms: float) -> None:
        """A step has taken so long."""
        self.cost = self.cost.observed(work, ms)

    def copied(self, way: Way, n_bytes: int, ms: float) -> None:
        """A copy has taken so long."""
        if n_bytes >= LEARN_FROM_BYTES:
            rate = n_bytes / max(ms, 1e-3)
            self.bytes_a_ms[way] += WEIGHT * (rate - self.bytes_a_ms[way])

    def decode_ms(self, streams: Sequence[Slot]) -> float:
        """What a step of these alone is predicted to take."""
        return self.cost.predict(Work(0, len(streams), sum([slot.context for slot in streams])))

    def copy_ms(self, way: Way, n_bytes: int) -> float:
        """What a copy is predicted to take."""
        return n_bytes / self.bytes_a_ms[way]

    def worth_loading(self, n_tokens: int, n_bytes: int) -> bool:
        """Whether reading, verifying and loading a state is predicted to be faster than computing ``n_tokens`` of it."""
        chunk = min(n_tokens, self._n_batch)
        compute_ms = self.cost.predict(Work(chunk, 0, 0, mean_prefill_context=n_tokens / 2)) * n_tokens / chunk
        return OVERHEAD_MS + self.copy_ms("read", n_bytes) + self.copy_ms("load", n_bytes) < compute_ms
