"""The two-phase policy: every stream gets its token, then prompts get what is left.

``plan`` is a pure function of what is ready, whose turn it is and how large the tick may be; it returns
whose turn it is next.  ``Pace`` moves the size of a tick towards a target in milliseconds.

Source: docs/ARCHITECTURE.md, "The scheduler".
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from typing import Final

import attrs

from uma_trio.config import Scheduling


class Phase(enum.Enum):
    """What a sequence needs from the next tick."""

    PREFILL = enum.auto()
    """Its prompt is being read."""
    DECODE = enum.auto()
    """It generates, one token a tick."""


@attrs.frozen
class Slot:
    """All that the policy may know about one sequence."""

    seq_id: int
    phase: Phase
    pending: int = 1
    """Tokens to be fed: what is left of the prompt; 1 while decoding."""
    silent_ms: float = 0.0
    """Since the last token was emitted; of no meaning before there was one."""


@attrs.frozen
class Share:
    """What one sequence gets of a tick."""

    seq_id: int
    n_tokens: int
    wants_logits: bool
    """For the last of these tokens: each decode, and the end of a whole prompt."""


@attrs.frozen
class Turns:
    """What one plan leaves for the next.

    Each phase notes the seq_id that it served last and resumes with the next higher one.
    """

    decode: int = -1
    prefill: int = -1
    """The last whose burst was complete: one that was cut off by the end of a tick goes on in the next."""
    begun: int = 0
    """Tokens of the burst that was cut off."""
    had_prompts: bool = False


@attrs.frozen
class Plan:
    """One tick."""

    shares: tuple[Share, ...]
    """In batch order, at most one a sequence: decodes first."""
    turns: Turns
    """To be given to the next call."""
    n_decodes: int
    n_prompt_tokens: int


def plan(
    slots: Iterable[Slot], turns: Turns, *, budget: int, capacity: int, limits: Scheduling
) -> Plan:
    """Choose what goes into the next ``llama_batch``.

    Decoding sequences come first and get one token each.  What is left of ``budget`` goes to prompts, a
    burst for each in turn and round again until it is used up: a short new prompt is not kept waiting by
    a long one, and of two long ones neither is ever more than a burst ahead.  However many streams there
    are, prompts get at least one burst; a stalled stream puts them off by one tick only.  With no stream
    to wait for them, prompts may fill the whole ``capacity``.

    Args:
        slots: the sequences that are ready, in any order.  One that waits for a slow client is not
            ready and not here.
        turns: from the plan before.
        budget: tokens that a tick with both kinds should have.
        capacity: tokens that fit into one batch: at least a burst more than there are streams, which
            ``config.load`` sees to.  With less, streams take turns as well.

    Returns:
        A plan of at most ``capacity`` tokens; of none only if nothing is ready.

    The example of docs/ARCHITECTURE.md, two streams and two prompts in a budget of 32:

    >>> ready = [Slot(0, Phase.DECODE), Slot(1, Phase.DECODE),
    ...          Slot(2, Phase.PREFILL, 50), Slot(3, Phase.PREFILL, 100)]
    >>> chosen = plan(ready, Turns(), budget=32, capacity=512, limits=Scheduling())
    >>> [(share.seq_id, share.n_tokens) for share in chosen.shares]
    [(0, 1), (1, 1), (2, 16), (3, 14)]
    """
    slots = list(slots)
    burst = limits.prefill_burst_tokens
    prompts = _in_turn((slot for slot in slots if slot.phase is Phase.PREFILL), turns.prefill)
    room = capacity - (burst if prompts else 0)
    decoding = _in_turn((slot for slot in slots if slot.phase is Phase.DECODE), turns.decode)[:room]
    shares = [Share(slot.seq_id, 1, wants_logits=True) for slot in decoding]
    if decoding:
        turns = attrs.evolve(turns, decode=decoding[-1].seq_id)
    left = max(budget - len(shares), burst) if decoding else capacity
    if turns.had_prompts and any(slot.silent_ms > limits.stall_guard_ms for slot in decoding):
        left = 0
    given, turns = _divide(prompts, min(left, capacity - len(shares)), burst, turns)
    for slot in prompts:
        if n := given.get(slot.seq_id, 0):
            shares.append(Share(slot.seq_id, n, wants_logits=n == slot.pending))
    return Plan(tuple(shares), turns, len(decoding), sum(given.values()))


def _in_turn(slots: Iterable[Slot], after: int) -> list[Slot]:
    return sorted(slots, key=lambda slot: (slot.seq_id <= after, slot.seq_id))


def _divide(prompts: list[Slot], tokens: int, burst: int, turns: Turns) -> tuple[dict[int, int], Turns]:
    """Cut ``tokens`` off the endless round of bursts: what each of ``prompts`` gets, by seq_id."""
    given: dict[int, int] = {}
    last, begun = turns.prefill, turns.begun
    waiting = deque(prompts)
    while tokens and waiting:
        slot = waiting.popleft()
        rest = slot.pending - given.get(slot.seq_id, 0)
        whole = min(rest, burst - begun) if waiting else min(rest, tokens)
        n = min(whole, tokens)
        given[slot.seq_id] = given.get(slot.seq_id, 0) + n
        tokens -= n
        if n < whole:
            begun += n
            break
        last, begun = slot.seq_id, 0
        if n < rest:
            waiting.append(slot)
    return given, attrs.evolve(turns, prefill=last, begun=begun, had_prompts=bool(given))


@attrs.frozen
class Pace:
    """How large a tick of both kinds may be, from how long such ticks took.

    Only ticks that hold prompt tokens move it: a tick of decodes alone says nothing about the price of
    a prompt token, and averaging both would make the budget swing.
    """

    budget: int
    average_ms: float | None = None

    WEIGHT: Final = 0.3  # of the newest tick in the average
    CALM: Final = 0.8  # of the target: between this and the target, the budget stays

    def after(
        self, tick_ms: float, *, capacity: int, limits: Scheduling, n_tokens: int | None = None
    ) -> Pace:
        """The pace after a tick of ``tick_ms`` that held decodes and prompt tokens.

        Args:
            n_tokens: of that tick, both kinds; ``None`` is as many as the budget.  One that stayed below
                the budget and was quick says nothing of how long a full one takes: after many short
                prompts a long one would get a tick far beyond the target.
        """
        if n_tokens is not None and n_tokens < self.budget and tick_ms <= limits.tick_target_ms:
            return self
        before = tick_ms if self.average_ms is None else self.average_ms
        average = before + self.WEIGHT * (tick_ms - before)
        floor = min(limits.min_budget_tokens, capacity)
        if average > limits.tick_target_ms:
            budget = int(self.budget * 0.8)
        elif average < self.CALM * limits.tick_target_ms:
            budget = int(self.budget * 1.1) + 1
        else:
            budget = self.budget
        budget = min(capacity, max(floor, budget))
        average *= budget / self.budget  # what that tick would have taken at the new size, roughly
        return Pace(budget, average)
