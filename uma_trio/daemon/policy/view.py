"""What the scheduler knows about a sequence."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import msgspec


class Priority(enum.IntEnum):
    """Class of a request.  Lower numbers are served first."""

    INTERACTIVE = 0
    NORMAL = 1
    BACKGROUND = 2


class SequenceView(msgspec.Struct, frozen=True, gc=False):
    """Immutable snapshot of one sequence, built for each plan.

    A msgspec struct, because one is built for every sequence in every tick.
    """

    seq_id: int
    """Sequence id in the KV cache; negative while the request waits for one."""
    n_pending: int = 1
    """Tokens to compute: the rest of the prompt during prefill, 1 while decoding."""
    n_context: int = 0
    """Tokens in the KV cache."""
    due_s: float = math.inf
    """When the next token is due, on the clock of ``Tick.now_s``.  During prefill: when the first one is."""
    priority: Priority = Priority.NORMAL
    principal: str = ""
    """Name of the principal that is charged for the tokens."""
    weight: float = 1.0
    """Share of service of the principal relative to others; above 0.  Equal in all views of one principal."""
    n_drafts: int = 0
    """Draft tokens that can be verified together with the next token."""
    acceptance_rate: float = 0.0
    """Recent share of this sequence's draft tokens that were accepted, 0 to 1."""
    drafts_by_model: bool = False
    """The draft model proposes the draft tokens, which takes time."""
    draft_precision: float = 1.0
    """Recent share of the draft model's tokens that were accepted.  It often proposes fewer tokens than it may."""
    n_missing: int = 0
    """Tokens that the draft model computes before it proposes the first one."""
    grace_s: float = 0.0
    """During prefill: how much later than ``due_s`` the first token may be before the prompt is overdue."""
    is_whole: bool = False
    """The pending tokens are computed in one tick or not at all: a picture whose rows attend to each other."""


def foreground(views: Iterable[SequenceView]) -> list[SequenceView]:
    """Those that wait for no others: all but those of class ``background``."""
    return [view for view in views if view.priority is not Priority.BACKGROUND]
