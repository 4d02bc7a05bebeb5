"""From tokens of a sequence to positions, where pictures take fewer positions than they have rows (M-RoPE).

Everything else counts tokens.  Only llama.cpp knows positions, so the engine translates.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec
import numpy as np

from uma_trio.engine_link.media import standing_runs
from uma_trio.engine_link.messages import StepInput


@attrs.define
class Positions:
    """Which tokens of each sequence take no position.  Empty for models without such pictures."""

    _runs: dict[int, list[tuple[int, int]]] = attrs.field(factory=dict)
    """By sequence id: where a run begins, and its length."""

    def of(self, seq_id: int, length: int) -> int:
        """The position after the first ``length`` tokens."""
        runs = self._runs.get(seq_id)
        return length if runs is None else length - sum([max(0, min(n, length - start)) for start, n in runs])

    def place(self, inputs: Sequence[StepInput]) -> Sequence[StepInput]:
        """The inputs of a call at their positions; rows of a picture with columns at the position of the picture.

        Notes the tokens that take none.

        Args:
            inputs: a result of ``split_by_media``: rows and tokens are in inputs of their own.
        """
        if columns := [step_input for step_input in inputs if step_input.media and step_input.media[0].columns]:
            first = columns[0]
            tokens = np.asarray(first.tokens, np.int32)
            self._note(first.seq_id, first.position, standing_runs(tokens, first.position))
        return [self._placed(step_input) for step_input in inputs] if self._runs or columns else inputs

    def _placed(self, step_input: StepInput) -> StepInput:
        before = step_input.media[0].row if step_input.media and step_input.media[0].columns else 0
        return msgspec.structs.replace(step_input, position=self.of(step_input.seq_id, step_input.position - before))

    def cut(self, seq_id: int, length: int) -> None:
        """The sequence holds its first ``length`` tokens only."""
        self._note(seq_id, length, [])

    def copy(self, source: int, target: int, length: int) -> None:
        """The first ``length`` tokens of ``source`` are in ``target``."""
        self.set(target, self._runs.get(source, ()))
        self.cut(target, length)

    def set(self, seq_id: int, runs: Sequence[tuple[int, int]]) -> None:
        """The sequence holds other tokens now."""
        self._runs.pop(seq_id, None)
        self._note(seq_id, 0, runs)

    def clear(self) -> None:
        """No sequence holds anything."""
        self._runs.clear()

    def _note(self, seq_id: int, start: int, runs: Sequence[tuple[int, int]]) -> None:
        """Replace what is known of the tokens from ``start`` on."""
        kept = [(begin, min(n, start - begin)) for begin, n in self._runs.pop(seq_id, ()) if begin < start]
        if kept or runs:
            self._runs[seq_id] = [*kept, *runs]
