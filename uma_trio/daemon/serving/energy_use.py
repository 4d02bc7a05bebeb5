"""What requests take of the energy that the machine counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import structlog

from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.step import StepRow
from uma_trio.processes.energy import EnergyMeter

log = structlog.get_logger("uma_trio.serving")

READ_EVERY_S: Final = 0.05
"""Counters are read after a step at most this often; those of cards change no more often."""


@attrs.define(eq=False)
class EnergyUse:
    """Divides what the counters say between the answers that steps have computed, by their rows.

    Args:
        meter: ``None``: nothing is counted.
    """

    _meter: EnergyMeter | None
    total_j: float = attrs.field(default=0.0, init=False)
    """What all steps have taken."""
    _n_rows: int = attrs.field(default=0, init=False)
    _rows: dict[Answer, int] = attrs.field(factory=dict, init=False)
    """Rows since the counters were read."""
    _read_j: float = attrs.field(default=0.0, init=False)
    _read_at: float = attrs.field(default=0.0, init=False)

    def snapshot(self) -> dict[str, float | None]:
        """Its part of the metrics."""
        return {
            "energy_joules_total": round(self.total_j, 3),
            "joules_per_token": round(self.total_j / self._n_rows, 4) if self.total_j and self._n_rows else None,
        }

    def begin(self, now: float) -> None:
        """Leave out what was taken until now, when the device had nothing to compute."""
        self._read(now)
        self._rows.clear()

    def step(self, rows: Mapping[Answer, StepRow], now: float) -> None:
        """Note the rows that a step has computed of each answer, before the answers know of it."""
        if self._meter is None:
            return
        for answer, row in rows.items():
            self._rows[answer] = self._rows.get(answer, 0) + max(1, row.end - answer.n_computed)
        if now >= self._read_at + READ_EVERY_S:
            self.divide(now)

    def divide(self, now: float) -> float:
        """Divide what was taken since the last time; returns it, in joules."""
        joules = self._read(now)
        n_rows = sum(self._rows.values())
        if n_rows and self._meter is not None:
            self.total_j += joules
            self._n_rows += n_rows
            for answer, n in self._rows.items():
                answer.energy_j = (answer.energy_j or 0.0) + joules * n / n_rows
            self._rows.clear()
        return joules

    def _read(self, now: float) -> float:
        if self._meter is None:
            return 0.0
        try:
            joules = self._meter.joules()
        except OSError as error:
            log.warning("energy is no longer counted", reason=str(error))
            self._meter = None
            return 0.0
        used, self._read_j, self._read_at = joules - self._read_j, joules, now
        return max(0.0, used)
