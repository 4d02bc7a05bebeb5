"""Copies of states between engine and files, each waiting for a step that has the time for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import attrs
import trio

from uma_trio.engine.records import Load, Save, StepResult
from uma_trio.kv.checkpoints import Checkpoints
from uma_trio.kv.entry import Entry
from uma_trio.kv.saving import Saving
from uma_trio.kv.shelf import Saved
from uma_trio.runner.pace import Pace
from uma_trio.scheduling.policy import Slot
from uma_trio.telemetry.metrics import OffloadMetrics

PATIENCE_S: Final = 0.25
"""After so long a copy no longer waits for a step that has time for it: it may make one take twice as long."""

GIVE_UP_S: Final = 3.0
"""After so long what somebody waits for is not saved, or not loaded."""


@attrs.define(eq=False)
class Transfer:
    """One state on its way between the engine and a file."""

    entry: Entry
    edit: Save | Load
    n_bytes: int
    asked_at: float
    points: Checkpoints = ()
    """Of the sequence that is saved."""
    state: Saved | None = None
    """The one that is loaded."""
    done: trio.Event = attrs.field(factory=trio.Event)
    refused: str | None = "the sequence was needed before"
    """Why it did not take place; ``None`` if it did."""

    @property
    def kind(self) -> Literal["save", "load"]:
        return "save" if isinstance(self.edit, Save) else "load"

    def makes_sense(self, kv: Saving) -> bool:
        """Its sequence still waits for its state; or has the one that is to be saved."""
        return kv.may_restore(self.entry) if self.kind == "load" else is_unchanged(kv, self.entry, self.points)


def is_unchanged(kv: Saving, entry: Entry, points: Checkpoints) -> bool:
    """Whether ``entry`` is idle yet and as it was, down to its checkpoints."""
    return kv.may_save(entry) and entry.points == points


class Transfers:
    """The copies that wait, of which a step makes one at most."""

    def __init__(self, kv: Saving, pace: Pace, meters: OffloadMetrics) -> None:
        self._kv = kv
        self._pace = pace
        self._meters = meters
        self._waiting: list[Transfer] = []
        self._ended_loads: list[Transfer] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, transfer: Transfer) -> None:
        """Have a step make it; ``done`` is set when it is made, or never will be."""
        self._waiting.append(transfer)

    def withdraw(self, transfer: Transfer) -> None:
        """Its buffer goes: no step is to make it any more."""
        if transfer in self._waiting:
            self._waiting.remove(transfer)

    def next(self, streams: Sequence[Slot]) -> Transfer | None:
        """The copy that the next step is to make, beside ``streams``.

        It takes what time there is until the first of them is due; after a while as long as they take themselves.
        """
        if not self._waiting:
            return None
        now = trio.current_time()
        tick_ms = self._pace.decode_ms(streams)
        spare_ms = 1e3 * (min([slot.due_s for slot in streams]) - now) - tick_ms if streams else math.inf
        for transfer in sorted(self._waiting, key=lambda transfer: transfer.kind):  # loads first: they are waited for
            if not transfer.makes_sense(self._kv):
                self._end(transfer)
                continue
            ms, waited = self.predicted_ms(transfer), now - transfer.asked_at
            if ms <= spare_ms or (waited > PATIENCE_S and ms <= tick_ms):
                self._waiting.remove(transfer)
                return transfer
            if waited > GIVE_UP_S and (transfer.kind == "load" or self._kv.somebody_waits):
                transfer.refused = "no step had time for it"
                self._end(transfer)
        return None

    def predicted_ms(self, transfer: Transfer) -> float:
        """What the step will take longer by it."""
        return self._pace.copy_ms(transfer.kind, transfer.n_bytes)

    def landed(self, transfer: Transfer, result: StepResult | None) -> None:
        """The step with ``transfer`` is done; ``None``: it failed."""
        if result is None:
            transfer.refused = "the step failed"
        else:
            transfer.refused = dict(result.refused).get(transfer.entry.seq_id)
            if transfer.kind == "save":  # less than was asked for, if some of it was removed just before
                transfer.n_bytes = result.saved_bytes
            self._pace.copied(transfer.kind, transfer.n_bytes, result.copied_ms)
            self._meters.record_stall(result.copied_ms)
        self._end(transfer)

    def take_ended_loads(self) -> list[Transfer]:
        """Those that ended since the last call."""
        ended, self._ended_loads = self._ended_loads, []
        return ended

    def _end(self, transfer: Transfer) -> None:
        self.withdraw(transfer)
        if transfer.kind == "load":
            self._ended_loads.append(transfer)
        transfer.done.set()
