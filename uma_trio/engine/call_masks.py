"""The masks that restrict the samples of one call: of grammars, and of controllers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.engine.call import Call
from uma_trio.engine.matchers import FilledMasks, PendingMasks
from uma_trio.engine_link.grammar_state import GrammarState
from uma_trio.engine_link.masks import Masks
from uma_trio.engine_link.messages import Step, StepCallbacks, StepInput


@attrs.define
class CallMasks:
    """The masks of one call; at least one kind of them."""

    pending: PendingMasks | None
    """Masks of grammars that are being filled."""
    timeout_ms: float
    """How long ``wait`` waits for them."""
    controller_rows: Mapping[int, int | None]
    """For each row of logits with a mask of a controller, the row of the mask; ``None`` if the mask has not come."""
    controller_masks: Masks | None
    """Has the rows that have come."""
    filled: FilledMasks | None = None
    """The masks of grammars after ``wait``."""

    def wait(self, logits: npt.NDArray[np.float32]) -> list[int]:
        """Wait for the masks of grammars, and add those of controllers to ``logits``; returns the rows whose mask is late."""
        late: list[int] = []
        if self.pending is not None:
            self.filled = self.pending.wait(self.timeout_ms)
            late += self.filled.late
        for at, row in self.controller_rows.items():
            if row is None or self.controller_masks is None:
                late.append(at)
            else:
                self.controller_masks.add_to(logits[at], row)
        return late


def masks_of(
    call: Call,
    pending: PendingMasks | None,
    step: Step[StepInput],
    controller_masks: Masks | None,
    callbacks: StepCallbacks | None,
) -> CallMasks | None:
    """The masks of a computed call; ``None`` if nothing restricts its samples.  Waits for those of controllers.

    Args:
        pending: masks of grammars.
        controller_masks: those that are attached.
    """
    keys = call.controller_keys
    if pending is None and not keys:
        return None
    ready = None
    if keys and controller_masks is not None and callbacks is not None:
        ready = callbacks.wait_for_masks(step.number, step.mask_timeout_ms)
    rows = {} if ready is None else ready.rows
    controller_rows = {at: rows.get(key) for at, key in keys.items()}
    return CallMasks(pending, step.mask_timeout_ms, controller_rows, controller_masks)


def constrained(inputs: Sequence[StepInput]) -> list[tuple[int, int, GrammarState, Sequence[int]]]:
    """Inputs that sample by a grammar: sequence, row of the first sample, state before it, drafts between the samples."""
    if not [step_input for step_input in inputs if step_input.grammar is not None]:
        return []
    by_grammar = []
    row = 0
    for step_input in inputs:
        n = len(step_input.samples)
        if n and step_input.grammar is not None:
            by_grammar.append((step_input.seq_id, row, step_input.grammar, step_input.tokens[-n:][1:]))
        row += n
    return by_grammar


def states_after(
    inputs: Sequence[StepInput], sampled: Sequence[int], end_ids: Sequence[int]
) -> list[tuple[int, GrammarState]]:
    """Sequences with a grammar that go on, and their grammars after the tokens that were sampled and accepted."""
    going_on = []
    for seq_id, row, grammar, drafts in constrained(inputs):
        tokens = sampled[row : row + 1 + len(drafts)]
        accepted = next((n for n, draft in enumerate(drafts) if tokens[n] != draft), len(drafts)) + 1
        if tokens[accepted - 1] >= 0 and tokens[accepted - 1] not in end_ids:
            going_on.append((seq_id, grammar.after(tokens[:accepted])))
    return going_on
