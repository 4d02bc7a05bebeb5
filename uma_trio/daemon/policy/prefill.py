"""How much of which prompts a tick computes next to its decodes: the time, the rows, and what is left of them for each.

Source: docs/design/scheduler.md, "Decodes, then prefill".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from uma_trio.config import Scheduling
from uma_trio.daemon.policy import fairness
from uma_trio.daemon.policy.cost import CostModel, Work
from uma_trio.daemon.policy.fairness import Service
from uma_trio.daemon.policy.tick import PolicyState, Tick, estimated_work
from uma_trio.daemon.policy.view import Priority, SequenceView

MAX_FURTHER_CALL: Final = 1.1
"""A second prompt begins in the tick in which another one ends only if the tick gets at most this many times longer."""

ROW_ALIGNMENT: Final = 16
"""Chunks that do not finish a prompt are rounded down to a multiple of this many rows, the tile size of matrix kernels.
docs/design/scheduler.md has the reason."""

MIN_ALIGNED_TOKENS: Final = 48
"""Smaller chunks are not aligned, since that would give up too large a share of them."""

SMOOTH_ROWS: Final = 512
"""At most this many rows has a tick with prompts while no more requests wait for their first token than stream.  So streams
are smoother than their targets ask.  Where more wait, they gain more by larger ticks than the streams lose."""

PREFILL_ONLY_MIN_CHUNKS: Final = 4
"""A tick without decodes has room for at least this many of the smallest chunks, however slow the device is."""

LATE_PREFILL_SHARE: Final = 0.5
"""Where decoding alone misses the earliest deadline, prompts may make a tick longer by this share."""

OVERDUE_PROMPT_STREAMS: Final = 2
"""A prompt whose first token is overdue may take as much of a tick as this many streams."""

MAX_OVERDUE_SHARE: Final = 2.0
"""Overdue prompts may make a tick longer by this share of the time that decoding alone takes, so streams keep at least
a third of their speed.  The share is at least ``LATE_PREFILL_SHARE``, and more only up to ``prefill_tick_ms``."""


def choose_prefill(tick: Tick, work: Work) -> tuple[list[tuple[SequenceView, int]], Work, Service]:
    """Choose which prompts advance next to the decodes, and by how many tokens.

    The budget (``PrefillBudget``) is what prompts get together.  It is rounded down so that the rows of the call fill
    tiles (``ROW_ALIGNMENT``), then divided between prompts (``fairness.divide``).  On a device that records calls, one
    token is left out where the call would be like the one before.

    Args:
        work: of the decodes alone.

    Returns:
        Each prompt that advances with its number of tokens, ``work`` with these tokens, and the service after them.
    """
    tick = _with_one_whole(tick)
    prefills, cost, settings, n_decodes = tick.prefills, tick.cost, tick.settings, len(tick.decodes)
    # The budget depends on the context before the chunks, and which prompts advance is not known yet.  So start from the
    # mean over all of them.
    mean_context = tick.attention.prefill_context(sum([view.n_context for view in prefills]) / len(prefills))
    work = attrs.evolve(work, mean_prefill_context=mean_context)
    budget_of = PrefillBudget(
        cost=cost,
        settings=settings,
        alone=estimated_work(tick.decodes, tick.attention),
        due_ms=tick.due_ms,
        max_tokens=tick.max_tokens,
        n_prompts=len(prefills),
        overdue=[view.n_pending for view in _overdue(tick)],
        follows_prefill=tick.state.prefill_rows > 0,
    )
    budget = budget_of.tokens(work)
    if MIN_ALIGNED_TOKENS <= budget < sum([view.n_pending for view in prefills]):
        aligned = budget - (budget + n_decodes if tick.mixes_prefill else budget) % ROW_ALIGNMENT
        budget = aligned if aligned >= settings.min_chunk_tokens else budget
    n_calls = work.n_calls
    while True:  # the chosen prompts may have more context than the mean, so less fits; mostly one round is enough
        given, service = _divide(tick, budget)
        work = _with_prefill(tick, work, given, n_calls=n_calls)
        rest = _rest_in_a_call_of_its_own(given, settings) if n_decodes and not tick.mixes_prefill else 0
        if rest and cost.predict(work) > MAX_FURTHER_CALL * cost.predict(attrs.evolve(work, n_calls=n_calls)):
            given, service = _divide(tick, budget - rest)
            work = _with_prefill(tick, work, given, n_calls=n_calls)
        budget = budget_of.tokens(work)
        if tick.records_calls and _would_be_recorded(given, n_decodes + work.prefill_tokens, tick.state):
            budget = min(budget, work.prefill_tokens - 1)
        if budget >= work.prefill_tokens:
            return _completed(tick, given, work, service)


def _with_one_whole(tick: Tick) -> Tick:
    """``tick`` with at most one prompt whose next tokens are computed whole: the one that is due first."""
    whole = [view for view in tick.prefills if view.is_whole]
    if len(whole) < 2:
        return tick
    first = min(whole, key=lambda view: view.due_s)
    return msgspec.structs.replace(
        tick, prefills=[view for view in tick.prefills if not view.is_whole or view is first]
    )


def _completed(
    tick: Tick, given: list[tuple[SequenceView, int]], work: Work, service: Service
) -> tuple[list[tuple[SequenceView, int]], Work, Service]:
    """``given`` with all tokens of a prompt that has a share, and whose tokens are computed whole.

    The tick is then longer than its budget, by a time that is known before it begins.  The rows are in a call of their own.
    """
    view, n = next(((view, n) for view, n in given if view.is_whole), (None, 0))
    if view is None:
        return given, work, service
    rest = view.n_pending - n
    given = [(sequence, m + rest if sequence is view else m) for sequence, m in given]
    service = service.charged({view.principal: rest / view.weight})
    return given, _with_prefill(tick, work, given, n_calls=work.n_calls + 1), service


def _rest_in_a_call_of_its_own(given: Sequence[tuple[SequenceView, int]], settings: Scheduling) -> int:
    """Tokens of the last chunk, if it begins a prompt after the end of another long one of its group; otherwise 0.

    With per-sequence KV, llama.cpp computes chunks of different lengths one after another.  After short prompts, which may
    come in every tick, a long one does not wait.  Nor does that of another principal, or of another class: each has its own
    share of the tick, and would get it in a chunk of another length.
    """
    if not given:
        return 0
    *others, (last, n) = given
    is_long = any(m > settings.prefill_burst_tokens for _, m in others)
    end = all(m == view.n_pending and m != n for view, m in others)
    one_group = len({(view.priority, view.principal) for view, _ in given}) == 1
    enough = sum([m for _, m in others]) >= settings.min_chunk_tokens
    return n if n < last.n_pending and is_long and end and one_group and enough else 0


def _would_be_recorded(given: Sequence[tuple[SequenceView, int]], rows: int, state: PolicyState) -> bool:
    """Whether the call would be like the call before, so that the device records it.  With one token fewer it is not.

    Recording takes several milliseconds.  The calls that repeat a recording save less: during prefill the KV cache is soon
    256 cells longer, and then the device records again.
    """
    n = sum([n for _, n in given])
    completes = any(n == view.n_pending for view, n in given)
    return n > 1 and not completes and rows == state.prefill_rows


def _overdue(tick: Tick) -> Sequence[SequenceView]:
    """The prompts whose first token is overdue, and that have at most ``max_tokens`` left to compute.

    A long prompt would slow down the streams for many seconds, and still be late.  A prompt is never overdue next to a
    stream of a higher class of its own principal, nor one of class ``background`` next to any stream of another class.
    """
    overdue = [
        view for view in tick.prefills if view.n_pending <= tick.max_tokens and view.due_s + view.grace_s < tick.now_s
    ]
    if not overdue:
        return overdue
    highest: dict[str, Priority] = {}
    for view in tick.decodes:
        highest[view.principal] = min(highest.get(view.principal, Priority.BACKGROUND), view.priority)
    only_background = all(priority is Priority.BACKGROUND for priority in highest.values())
    return [
        view
        for view in overdue
        if view.priority <= highest.get(view.principal, Priority.BACKGROUND)
        and (view.priority is not Priority.BACKGROUND or only_background)
    ]


class PrefillBudget(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Prefill tokens that a tick has time and rows for; ``choose_prefill`` divides them.

    =========================================  ================================================================
    situation                                  tokens
    =========================================  ================================================================
    no decodes                                 what ``prefill_tick_ms`` allows, and at least
                                               ``PREFILL_ONLY_MIN_CHUNKS`` of the smallest chunks, or one next to
                                               which others wait
    decodes leave time                         what fits before the earliest deadline, less the margin; not more
                                               than is worthwhile (``CostModel.worthwhile_prefill_tokens``)
    they leave less than the smallest chunk    the smallest chunk in every other tick
    they are late even alone                   what makes the tick longer by ``LATE_PREFILL_SHARE``, in every tick
    prompts are overdue                        also what makes the tick longer by ``LATE_PREFILL_SHARE``, or by the
                                               time of ``OVERDUE_PROMPT_STREAMS`` streams for each of them, up to
                                               ``MAX_OVERDUE_SHARE`` and ``prefill_tick_ms``; not more than is
                                               worthwhile, nor than these prompts have
    more prompts than decodes                  what fits before the earliest deadline, less the margin
    always                                     at most ``max_tokens`` rows together with the decodes; next to as many
                                               decodes as prompts, at most ``SMOOTH_ROWS``
    =========================================  ================================================================

    The smallest chunk is ``min_chunk_tokens``.
    """

    cost: CostModel
    settings: Scheduling
    alone: Work
    """Work of the decodes in one call."""
    due_ms: float
    """Until the tick has to end; infinite if nobody waits for that."""
    max_tokens: int
    """Rows of the largest batch."""
    n_prompts: int
    """How many requests wait for their first token."""
    overdue: Sequence[int]
    """Tokens of each prompt whose first token is overdue."""
    follows_prefill: bool
    """The tick before had prefill chunks."""

    def tokens(self, work: Work) -> int:
        """The budget next to ``work``, of the decodes in the calls of a tick with prefill; not positive if there is no room."""
        cost, settings, alone, due_ms = self.cost, self.settings, self.alone, self.due_ms
        n_decodes, max_tokens, overdue = alone.decode_rows, self.max_tokens, self.overdue
        if not n_decodes:
            least = settings.min_chunk_tokens * (PREFILL_ONLY_MIN_CHUNKS if due_ms == math.inf else 1)
            most = cost.max_prefill_tokens(min(due_ms, settings.prefill_tick_ms), work)
            return int(min(max_tokens, max(least, most)))
        in_time = cost.max_prefill_tokens(due_ms * (1 - cost.mixed.margin(due_ms)), work)
        if overdue:
            share = min(MAX_OVERDUE_SHARE, OVERDUE_PROMPT_STREAMS * len(overdue) / n_decodes)
            decode_ms = cost.predict(alone)
            late_ms = max((1 + LATE_PREFILL_SHARE) * decode_ms, min((1 + share) * decode_ms, settings.prefill_tick_ms))
            late = cost.max_prefill_tokens(late_ms, work)
            in_time = max(in_time, min(late, max(settings.min_chunk_tokens, sum(overdue))))
        least = max(settings.min_chunk_tokens, settings.prefill_burst_tokens)
        if self.n_prompts <= n_decodes:
            max_tokens = min(max_tokens, max(SMOOTH_ROWS, n_decodes + least))
            if in_time > least:
                in_time = min(in_time, max(least, cost.worthwhile_prefill_tokens(work, max_tokens - n_decodes)))
        if in_time < settings.min_chunk_tokens:
            in_time = 0 if self.follows_prefill else settings.min_chunk_tokens
            decode_ms = cost.predict(alone)
            if decode_ms > due_ms:
                late = cost.max_prefill_tokens((1 + LATE_PREFILL_SHARE) * decode_ms, work)
                in_time = late if late >= settings.min_chunk_tokens else in_time
        return int(min(max_tokens - n_decodes, in_time))


def _divide(tick: Tick, budget: int) -> tuple[list[tuple[SequenceView, int]], Service]:
    """The prompts that get ``budget`` tokens, with the tokens of each, and the service after that."""
    service = tick.state.service
    if budget <= 0:
        return [], service
    token_s = 1e-3 * tick.cost.prefill_token_ms
    return fairness.divide(tick.prefills, budget, service, burst=tick.settings.prefill_burst_tokens, token_s=token_s)


def _with_prefill(tick: Tick, work: Work, given: Sequence[tuple[SequenceView, int]], *, n_calls: int) -> Work:
    """``work`` with the prefill tokens ``given`` in place of its own.

    Args:
        n_calls: with chunks of one length.
    """
    n = sum([n for _, n in given])
    mean_context = sum([view.n_context * n for view, n in given]) / n if n else 0.0
    mean_context = tick.attention.prefill_context(mean_context) if n else 0.0
    n_calls += 0 if tick.mixes_prefill else max(0, len({n for _, n in given}) - 1)
    return attrs.evolve(work, prefill_tokens=n, mean_prefill_context=mean_context, n_calls=n_calls)
