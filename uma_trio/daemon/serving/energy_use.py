"""What requests take of the energy that the machine counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import structlog
import trio

from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.step import StepRow
from uma_trio.processes.energy import EnergyMeter

log = structlog.get_logger("uma_trio.serving")

READ_EVERY_S: Final = 0.1
"""How long the power is averaged.  The counters of cards change no more often."""


@attrs.define(eq=False)
class EnergyUse:
    """Divides the energy of each step between its answers, by their rows.

    The energy is the time since the step before, times the power that a task of its own measures: to read the counter of a
    card takes up to 10 ms, and no step waits for that.

    Args:
        meter: ``None``: nothing is counted.
    """

    _meter: EnergyMeter | None
    watts: float | None = attrs.field(default=None, init=False)
    """The latest power; ``None``: not known."""
    total_j: float = attrs.field(default=0.0, init=False)
    """What all steps have taken."""
    _n_rows: int = attrs.field(default=0, init=False)
    _divided_at: float = attrs.field(default=0.0, init=False)
    """Up to when the energy was divided."""
    _has_work: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set by every step, and taken back by every reading."""

    def snapshot(self) -> dict[str, float | None]:
        """Its part of the metrics."""
        return {
            "energy_joules_total": round(self.total_j, 3),
            "joules_per_token": round(self.total_j / self._n_rows, 4) if self.total_j and self._n_rows else None,
        }

    async def run(self) -> None:
        """Measure the power while there is work, and once before, until cancelled or until a counter cannot be read."""
        if self._meter is None:
            return
        try:
            while True:
                before = await self._meter.read()
                since = trio.current_time()
                while True:
                    await trio.sleep(READ_EVERY_S)
                    joules = await self._meter.read()
                    now = trio.current_time()
                    self.watts = max(0.0, joules - before) / (now - since)
                    if not self._has_work.is_set():
                        break
                    self._has_work = trio.Event()
                    before, since = joules, now
                await self._has_work.wait()
        except OSError as error:
            log.warning("energy is no longer counted", reason=str(error))
            self.watts = None

    def begin(self, now: float) -> None:
        """Leave out what was taken until now, when the device had nothing to compute."""
        self._divided_at = now
        self._has_work.set()

    def step(self, rows: Mapping[Answer, StepRow], now: float) -> None:
        """Divide the energy since the step before between the answers of a step, before they know of it."""
        if self._meter is None:
            return
        self._has_work.set()
        seconds, self._divided_at = now - self._divided_at, now
        if self.watts is None or not rows:
            return
        n_rows = {answer: max(1, row.end - answer.n_computed) for answer, row in rows.items()}
        joules, n = self.watts * seconds, sum(n_rows.values())
        self.total_j += joules
        self._n_rows += n
        for answer, n_own in n_rows.items():
            answer.energy_j = (answer.energy_j or 0.0) + joules * n_own / n
