"""What a plan depends on: the sequences that are ready, the state after the plan before, and the cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import msgspec

from uma_trio.config import Scheduling
from uma_trio.daemon.policy.cost import CostModel, DraftCost, Work
from uma_trio.daemon.policy.fairness import Service
from uma_trio.daemon.policy.gaps import NO_FILLERS
from uma_trio.daemon.policy.view import SequenceView
from uma_trio.engine_link.attention import Attention, AttentionScan

OWN_CONTEXTS: Final = Attention()
"""``AttentionScan.SEQUENCE``: each row scans the cells of its own sequence."""

NO_DRAFT_MODEL: Final = DraftCost()


@attrs.frozen
class PolicyState:
    """What one plan leaves for the next.  Immutable."""

    service: Service = attrs.field(factory=Service)
    prefill_rows: int = 0
    """Rows of the previous tick, if it had prefill chunks; otherwise 0."""
    background_skips: int = 0
    """Ticks in a row that left background sequences out, all or some of them."""
    n_without_drafts: int = 0
    """Ticks in a row that could have had draft tokens and had none."""
    n_decodes: int = 0
    """Decodes of the previous tick."""
    n_alike: int = 0
    """Ticks in a row that had as many decodes as the previous one."""

    def after_decode(self, views: Sequence[SequenceView]) -> PolicyState:
        """The state after a tick that decoded one token for each of ``views`` and nothing else."""
        n_alike = self.n_alike + 1 if len(views) == self.n_decodes else 1
        service = self.service.decoded(views)
        return attrs.evolve(self, service=service, prefill_rows=0, n_decodes=len(views), n_alike=n_alike)

    def undo(self, before: PolicyState, after: PolicyState) -> PolicyState:
        """The state as if the plan that led from ``before`` to ``after`` had not been made.

        Principals that became active or idle since then remain so.
        """
        return attrs.evolve(before, service=self.service.refunded(before.service, after.service))

    def without(self, principal: str) -> PolicyState:
        """Make ``principal`` idle, because its last request has ended."""
        return attrs.evolve(self, service=self.service.without(principal))


class Tick(msgspec.Struct, frozen=True, gc=False):
    """All that a plan depends on.

    A msgspec struct, because one is built for every plan.
    """

    decodes: Sequence[SequenceView]
    """Sequences in the decode phase that are ready, by ``seq_id``.  One that waits for a slow client is not ready."""
    prefills: Sequence[SequenceView]
    """Sequences in the prefill phase that are ready."""
    state: PolicyState
    """``Plan.state`` of the previous plan."""
    now_s: float
    """When the tick begins, in seconds on the clock of the views' ``due_s``."""
    cost: CostModel
    """Predicts the time of a tick."""
    settings: Scheduling
    max_tokens: int
    """Rows of the largest batch.  ``config.load`` ensures that it exceeds the decodes by a burst."""
    mixes_prefill: bool = True
    """One call computes all of its rows together (unified KV).  With per-sequence KV, llama.cpp splits a batch: it computes
    decodes together only if their sequence ids are consecutive, and prefill separately.  The plan then splits the batch
    itself, into the calls that suit the device."""
    records_calls: bool = False
    """The device records a call that is like the one before, to repeat it (CUDA graphs)."""
    attention: Attention = OWN_CONTEXTS
    """The cells that a row scans.  With ``AttentionScan.LONGEST``, sequences with very different context lengths go into
    separate calls where that is faster."""
    fillers: Mapping[int, int] = NO_FILLERS
    """Tokens that each sequence holds that can get a filler row (``ModelInfo.fills_gaps``), by sequence id.  A call with gaps
    stays one call if that is predicted to be faster than one call for each run of consecutive ids."""
    draft_cost: DraftCost = NO_DRAFT_MODEL
    """Predicts the time of the draft model."""
    gap_ms: float = 0.0
    """Milliseconds for which the device waits before a tick.  Draft tokens make fewer ticks, and so fewer gaps."""
    longest_ms: float = math.inf
    """Milliseconds that the tick may take, whatever the deadlines are."""

    @property
    def due_ms(self) -> float:
        """Milliseconds until the tick has to end: the earliest deadline of the decodes, or before."""
        return min(self.longest_ms, 1e3 * (min([view.due_s for view in self.decodes], default=math.inf) - self.now_s))


def estimated_work(decodes: Sequence[SequenceView], attention: Attention = OWN_CONTEXTS) -> Work:
    """What a tick with these decodes alone computes, in one call."""
    return Work(0, len(decodes), _context(decodes, attention))


def _context(views: Sequence[SequenceView], attention: Attention) -> int:
    """Cells that the rows of ``views`` scan.  With ``AttentionScan.LONGEST`` this assumes calls of equal contexts."""
    if attention.scan is AttentionScan.CACHE:
        return len(views) * attention.cells_scanned
    return sum([view.n_context for view in views])
