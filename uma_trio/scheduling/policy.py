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

EVEN: Final = 16
"""Rows of a call that leaves some of a prompt for later are a multiple of it: matrix kernels work in tiles.  On a CPU a
chunk of 60 tokens took as long as one of 64; on an H200 the cost rose by a millisecond from 96 rows to 97."""

EVEN_FROM: Final = 64
"""Prompt tokens; of fewer too large a share would be given up."""

MOST_MARGIN: Final = 0.1
"""Most of the time until a stream is due that is kept for a tick that takes longer than predicted: as much as the
predictions were off lately, for half of all ticks would be late that aim at the moment itself."""

DRAFTS: Final = (1, 2, 4, 8, 16)
"""Guesses a stream that are considered."""

WORTH_DRAFTING: Final = 1.05
"""Tokens a millisecond with guesses must be so many times those without."""


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
    """When its next token is due, on the clock of ``now_s``; while its prompt is read: its first."""
    priority: Priority = Priority.NORMAL
    tenant: int = 0
    """Whose service it counts as."""
    drafts: int = 0
    """Guesses at what follows its next token, which can be fed with it and checked."""
    hits: float = 0.0
    """The share of its guesses that came true lately."""


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

    def decoding(self, served: Sequence[Slot]) -> Memory:
        """After a tick of ``served`` alone."""
        return Memory(self.service.decoded(served), False, self.sat_out)

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
    widths: tuple[int, ...]
    """The streams cut into calls of ``llama_decode``, in order."""
    prompts_apart: bool = False
    """The prompts have a call of their own, after the streams'."""
    drafts: Sequence[int] = ()
    """Guesses to be fed with each of ``streams``; empty if there are none at all."""


def plan(
    streams: Sequence[Slot],
    prompts: Sequence[Slot],
    memory: Memory,
    *,
    now_s: float,
    cost: CostModel,
    capacity: int,
    limits: Scheduling,
    mixes: bool = True,
    pads: bool = False,
) -> Plan:
    """Choose what goes into the next tick.

    Streams come first, each with one token; only background ones may sit out a few ticks, when with them
    somebody's token would be late.  Prompts get as many tokens as the tick is predicted to have time for
    until the first of the streams is due.  Where even the smallest chunk that pays would make somebody
    late, prompts and punctuality take turns, tick by tick: neither starves.  With no stream to wait for
    them, prompts may take ``prefill_tick_ms``.  With no prompts, streams may check guesses at their next
    tokens where that is predicted to give more tokens in the same time.

    Args:
        streams: sequences that decode and are ready, by id.  One that waits for a slow client is not here.
        prompts: sequences whose prompt is being read.
        memory: from the plan before.
        now_s: the present, on the clock of the slots' ``due_s``.
        cost: predicts what a tick takes.
        capacity: tokens that fit into one batch: at least a burst more than there are streams, which
            ``config.load`` sees to.
        mixes: what is in one call is computed together.  Where each sequence has cells of its own, llama.cpp
            computes decodes together only of sequences whose ids follow each other, and prompts apart; so such
            a batch is better cut here, at the sizes that suit the device.
        pads: attention takes as long for each stream of a call as for the one with the most context, so that
            short ones are better not computed together with a long one.

    Returns:
        A plan of at most ``capacity`` tokens; of none only if nothing is ready.

    Two streams, due in 30 ms, and two prompts, on a device that takes 2 ms a tick and 1 ms for each token:

    >>> from uma_trio.scheduling.cost import Line
    >>> line = Line((2.0, 100.0, 10.0, 0.0, 0.0))
    >>> chosen = plan([Slot(0, due_s=0.030), Slot(1, due_s=0.030)], [Slot(2, 10), Slot(3, 100)], Memory(),
    ...               now_s=0.0, cost=CostModel(line, line), capacity=512,
    ...               limits=Scheduling(prefill_burst_tokens=16))
    >>> [slot.seq_id for slot in chosen.streams], [(share.seq_id, share.n_tokens) for share in chosen.shares]
    ([0, 1], [(2, 10), (3, 16)])
    """
    served, sat_out = _served(streams, memory.sat_out, now_s, cost)
    if not prompts:
        return _decodes(served, attrs.evolve(memory, sat_out=sat_out), now_s, cost, capacity, mixes=mixes, pads=pads)
    apart = bool(served) and not mixes
    widths = _cut(served, cost, mixes=False, pads=pads) if apart else (len(served),)
    work = Work(0, len(served), _read(served, widths, pads=pads), calls=len(widths) + apart)
    # what stands before a chunk is read again for each of its tokens, and takes its time; before they are
    # chosen, as much as before all prompts on average
    before = sum([slot.context for slot in prompts]) / len(prompts)
    room = _room(served, attrs.evolve(work, prompt_context=before), memory, now_s, cost, capacity, limits)
    if EVEN_FROM <= room < sum([slot.pending for slot in prompts]):
        room -= (room if apart else room + len(served)) % EVEN
    while True:  # with less room other prompts are left, and more may stand before them; mostly once is enough
        given, service = _divided(prompts, room, memory.service, limits)
        work = _with_prompts(work, given)
        room = _room(served, work, memory, now_s, cost, capacity, limits)
        if room >= work.prompt_tokens:
            break
    if not given:
        memory = attrs.evolve(memory, service=service, sat_out=sat_out)
        return _decodes(served, memory, now_s, cost, capacity, mixes=mixes, pads=pads)
    shares = tuple([Share(slot.seq_id, n, n == slot.pending) for slot, n in given])
    after = Memory(service.decoded(served), True, sat_out)
    return Plan(served, shares, after, work, cost.predict(work), widths, apart)


def _decodes(
    served: Sequence[Slot],
    memory: Memory,
    now_s: float,
    cost: CostModel,
    capacity: int,
    *,
    mixes: bool,
    pads: bool,
) -> Plan:
    """A tick of streams alone."""
    after = memory.decoding(served)
    widths = _cut(served, cost, mixes=mixes, pads=pads)
    work = Work(0, len(served), _read(served, widths, pads=pads), calls=len(widths))
    if any(slot.drafts for slot in served):
        drafts, drafted = _drafts(served, work, widths, now_s, cost, capacity, pads=pads)
        if drafts:
            return Plan(served, (), after, drafted, cost.predict(drafted), (len(served),), drafts=drafts)
    return Plan(served, (), after, work, cost.predict(work), widths)


def _cut(served: Sequence[Slot], cost: CostModel, *, mixes: bool, pads: bool) -> tuple[int, ...]:
    """``served`` cut into calls, in order, as takes least."""
    widths: list[int] = []
    at = 0
    for run in _runs(served, mixes=mixes):
        contexts = [slot.context for slot in served[at : at + run]] if pads else ()
        widths += cost.cut(run, contexts)
        at += run
    return tuple(widths)


def _read(served: Sequence[Slot], widths: Sequence[int], *, pads: bool) -> int:
    """What the attention of ``served`` reads, cut into calls of ``widths``."""
    contexts = [slot.context for slot in served]
    if not pads:
        return sum(contexts)
    read = at = 0
    for width in widths:
        read += width * max(contexts[at : at + width], default=0)
        at += width
    return read


def _runs(served: Sequence[Slot], *, mixes: bool) -> tuple[int, ...]:
    """Numbers of streams, in order, that one call computes together."""
    if mixes or len(served) < 2 or served[-1].seq_id - served[0].seq_id == len(served) - 1:
        return (len(served),)
    starts = [n for n in range(1, len(served)) if served[n].seq_id != served[n - 1].seq_id + 1]
    return tuple([end - start for start, end in zip([0, *starts], [*starts, len(served)], strict=True)])


def _drafts(
    served: Sequence[Slot],
    work: Work,
    widths: Sequence[int],
    now_s: float,
    cost: CostModel,
    capacity: int,
    *,
    pads: bool,
) -> tuple[Sequence[int], Work]:
    """How many guesses each stream checks, where that gives more tokens in the same time than calls of ``widths``."""
    plain_ms = cost.of_rows(0, work.context_tokens) + sum([cost.of_rows(width, 0) for width in widths])
    best = WORTH_DRAFTING * len(served) / max(plain_ms, 1e-6)
    found: Sequence[int] = ()
    drafted = work
    left_ms = 1e3 * (min([slot.due_s for slot in served]) - now_s)
    for most in DRAFTS:
        drafts = [min(slot.drafts, most) for slot in served]
        rows = len(served) + sum(drafts)
        if pads:
            context = rows * max([slot.context for slot in served])
        else:
            context = work.context_tokens + sum([n * slot.context for n, slot in zip(drafts, served, strict=True)])
        tried = Work(0, rows, context)
        ms = cost.of_rows(rows, context)
        if rows > capacity or ms > left_ms:
            break
        tokens = sum([_expected(slot.hits, n) for n, slot in zip(drafts, served, strict=True)])
        if tokens > best * ms:
            best, found, drafted = tokens / ms, tuple(drafts), tried
        if max(slot.drafts for slot in served) <= most:
            break
    return found, drafted


def _expected(hits: float, guesses: int) -> float:
    """Tokens from a stream that checks ``guesses``, each true with probability ``hits`` if the ones before are."""
    return (1 - hits ** (guesses + 1)) / (1 - hits) if hits < 1 else guesses + 1.0


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


def _served(streams: Sequence[Slot], sat_out: int, now_s: float, cost: CostModel) -> tuple[Sequence[Slot], int]:
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
        left_ms = 1e3 * (min([slot.due_s for slot in served]) - now_s)
        in_time = cost.largest_prompt(left_ms * (1 - min(cost.mixed.error, MOST_MARGIN)), work)
        if in_time < limits.min_chunk_tokens:
            in_time = 0 if memory.had_prompts else limits.min_chunk_tokens
    else:
        in_time = max(4 * limits.min_chunk_tokens, cost.largest_prompt(limits.prefill_tick_ms, work))
    return int(min(free, in_time))
