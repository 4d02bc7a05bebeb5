"""What the next tick holds: every stream's token, then prompts in the milliseconds that are left.

``plan`` is a pure function of what is ready, what was before, and what a tick is predicted to take.

Source: docs/ARCHITECTURE.md, "The scheduler".
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Final

import attrs

from uma_trio.config import Scheduling
from uma_trio.scheduling import fairness
from uma_trio.scheduling.cost import CostModel, Work
from uma_trio.scheduling.fairness import Service

BACKGROUND_SITS_OUT: Final = 4
"""Ticks in a row at most that a background stream is left out of."""


class Priority(enum.IntEnum):
    """Classes of requests; the lower number goes first."""

    INTERACTIVE = 0
    NORMAL = 1
    BACKGROUND = 2


@attrs.define(eq=False, slots=True)
class Slot:
    """All that the policy may know about one sequence.  It reads them; who made them keeps them current."""

    seq_id: int
    pending: int = 1
    """Tokens to be fed: what is left of the prompt; 1 while decoding."""
    context: int = 0
    """Tokens in the KV cache."""
    due_s: float = math.inf
    """While decoding: when its next token is due, on the clock of ``now_s``."""
    priority: Priority = Priority.NORMAL
    tenant: int = 0
    """Whose service it counts as."""


@attrs.frozen
class Share:
    """What one prompt gets of a tick."""

    seq_id: int
    n_tokens: int
    ends: bool
    """These are its last; only then logits are wanted."""


@attrs.frozen
class Memory:
    """What one plan leaves for the next."""

    service: Service = attrs.field(factory=Service)
    had_prompts: bool = False
    sat_out: int = 0
    """Ticks in a row that background streams were left out of."""

    def without(self, tenant: int) -> Memory:
        """``tenant`` has nothing to do any more."""
        return attrs.evolve(self, service=self.service.without(tenant))


@attrs.frozen
class Plan:
    """One tick."""

    streams: Sequence[Slot]
    """Those that get a token: one row each, in batch order, before the prompts."""
    shares: tuple[Share, ...]
    """At most one a prompt."""
    memory: Memory
    """To be given to the next call."""
    work: Work
    predicted_ms: float


def plan(
    streams: Sequence[Slot],
    prompts: Sequence[Slot],
    memory: Memory,
    *,
    now_s: float,
    cost: CostModel,
    capacity: int,
    limits: Scheduling,
) -> Plan:
    """Choose what goes into the next ``llama_batch``.

    Streams come first, each with one token; only background ones may sit out a few ticks, when with them
    somebody's token would be late.  Prompts get as many tokens as the tick is predicted to have time for
    until the first of the streams is due.  Where even the smallest chunk that pays would make somebody
    late, prompts and punctuality take turns, tick by tick: neither starves.  With no stream to wait for
    them, prompts may take ``prefill_tick_ms``.

    Args:
        streams: sequences that decode and are ready.  One that waits for a slow client is not here.
        prompts: sequences whose prompt is being read.
        memory: from the plan before.
        now_s: the present, on the clock of the slots' ``due_s``.
        cost: predicts what a tick takes.
        capacity: tokens that fit into one batch: at least a burst more than there are streams, which
            ``config.load`` sees to.

    Returns:
        A plan of at most ``capacity`` tokens; of none only if nothing is ready.

    Two streams, due in 30 ms, and two prompts, on a device that takes 2 ms a tick and 1 ms for each token:

    >>> from uma_trio.scheduling.cost import Line
    >>> line = Line((2.0, 100.0, 10.0, 0.0, 0.0))
    >>> chosen = plan([Slot(0, due_s=0.030), Slot(1, due_s=0.030)], [Slot(2, 50), Slot(3, 100)], Memory(),
    ...               now_s=0.0, cost=CostModel(line, line), capacity=512,
    ...               limits=Scheduling(prefill_burst_tokens=16))
    >>> [slot.seq_id for slot in chosen.streams], [(share.seq_id, share.n_tokens) for share in chosen.shares]
    ([0, 1], [(2, 16), (3, 10)])
    """
    served, sat_out = _served(streams, memory.sat_out, now_s, cost)
    work = Work(0, len(served), sum([slot.context for slot in served]))
    given: list[tuple[Slot, int]] = []
    service = memory.service
    if prompts:
        # what stands before a chunk is read again for each of its tokens, and takes its time; before they are
        # chosen, as much as before all prompts on average
        before = sum([slot.context for slot in prompts]) / len(prompts)
        room = _room(served, attrs.evolve(work, prompt_context=before), memory, now_s, cost, capacity, limits)
        while True:  # with less room other prompts are left, and more may stand before them; mostly once is enough
            given, service = _divided(prompts, room, memory.service, limits)
            work = _with_prompts(work, given)
            room = _room(served, work, memory, now_s, cost, capacity, limits)
            if room >= work.prompt_tokens:
                break
    shares = tuple([Share(slot.seq_id, n, n == slot.pending) for slot, n in given])
    after = Memory(service.decoded(served), had_prompts=bool(shares), sat_out=sat_out)
    return Plan(served, shares, after, work, cost.predict(work))


def _divided(
    prompts: Sequence[Slot], room: int, service: Service, limits: Scheduling
) -> tuple[list[tuple[Slot, int]], Service]:
    if room <= 0:
        return [], service
    return fairness.divide(prompts, room, service, burst=limits.prefill_burst_tokens)


def _with_prompts(work: Work, given: Sequence[tuple[Slot, int]]) -> Work:
    n = sum([n for _, n in given])
    before = sum([slot.context * n for slot, n in given]) / n if n else 0.0
    return attrs.evolve(work, prompt_tokens=n, prompt_context=before)


def _served(
    streams: Sequence[Slot], sat_out: int, now_s: float, cost: CostModel
) -> tuple[Sequence[Slot], int]:
    """The streams of this tick, and for how many ticks some have sat out."""
    first = [slot for slot in streams if slot.priority is not Priority.BACKGROUND]
    if len(first) == len(streams) or not first or sat_out >= BACKGROUND_SITS_OUT:
        return streams, 0
    with_all = cost.predict(Work(0, len(streams), sum([slot.context for slot in streams])))
    if 1e3 * (min([slot.due_s for slot in first]) - now_s) >= with_all:
        return streams, 0
    return first, sat_out + 1


def _room(
    served: Sequence[Slot],
    work: Work,
    memory: Memory,
    now_s: float,
    cost: CostModel,
    capacity: int,
    limits: Scheduling,
) -> int:
    """Prompt tokens that this tick has time for."""
    free = capacity - len(served)
    if served:
        in_time = cost.largest_prompt(1e3 * (min([slot.due_s for slot in served]) - now_s), work)
        if in_time < limits.min_chunk_tokens:
            in_time = 0 if memory.had_prompts else limits.min_chunk_tokens
    else:
        in_time = max(4 * limits.min_chunk_tokens, cost.largest_prompt(limits.prefill_tick_ms, work))
    return int(min(free, in_time))
