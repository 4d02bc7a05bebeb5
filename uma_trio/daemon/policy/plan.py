"""Plans the next tick: one token for every decoding sequence, then prefill in the time that is left.

``plan`` is a pure function of a ``Tick``: the sequences that are ready, the state after the previous plan, the cost model.

Source: docs/design/scheduler.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from uma_trio.daemon.policy.cost import Work
from uma_trio.daemon.policy.gaps import contexts_with_fillers, join_runs, runs_of_consecutive_ids
from uma_trio.daemon.policy.prefill import choose_prefill
from uma_trio.daemon.policy.tick import PolicyState, Tick, estimated_work
from uma_trio.daemon.policy.view import Priority, SequenceView, foreground
from uma_trio.engine_link.attention import AttentionScan

MAX_BACKGROUND_STRETCH: Final = 4.0
"""A tick in which it is the turn of background sequences takes at most this many times as long as without them."""

BACKGROUND_TICK: Final = 0.5
"""Length of a tick with background sequences alone, as a share of ``target_itl_ms``: a new request waits for its end."""

DRAFT_LENGTHS: Final = (1, 2, 4, 8, 16, 32)
"""Draft tokens for each sequence that the policy considers."""

DRAFT_PROBABILITIES: Final = (0.1, 0.9)
"""Bounds of ``Plan.min_draft_probability``."""

MIN_DRAFT_SPEEDUP: Final = 1.05
"""Draft tokens are verified only if the tick then gives at least this many times as many tokens a millisecond."""

TICKS_WITHOUT_DRAFTS: Final = 64
"""After this many ticks in a row that could have had draft tokens and had none, one tick has some, although it is predicted to
give fewer tokens a millisecond.  Otherwise the cost model would not learn that drafts have become cheaper or better."""


@attrs.frozen
class PrefillChunk:
    """The part of a prompt that one tick computes."""

    seq_id: int
    n_tokens: int
    is_last: bool
    """Completes the prompt.  Only the last chunk needs logits."""


@attrs.frozen
class Plan:
    """What one tick computes."""

    decodes: Sequence[SequenceView]
    """Sequences that get their next token, in batch order."""
    chunks: tuple[PrefillChunk, ...]
    """At most one for each prompt."""
    state: PolicyState
    """Pass it to the next ``plan``."""
    work: Work
    """What ``predicted_ms`` is predicted for."""
    predicted_ms: float
    """Milliseconds of the tick, those of the draft model included."""
    call_widths: tuple[int, ...]
    """How many of ``decodes``, in order, go into each ``llama_decode`` call."""
    prefill_separately: bool = False
    """The chunks go into a call of their own.  Otherwise they go into the last call."""
    drafts: Sequence[int] = ()
    """Draft tokens to verify with each of ``decodes``; empty if there are none.  The draft model may propose fewer."""
    n_passes: int = 1
    """Forward passes in a row: each gives one token of each of ``decodes``.  ``work`` is that of one pass."""
    min_draft_probability: float = 0.0
    """The draft model ends a draft when the probability that all of it is right falls below this: more would not pay."""

    @property
    def pass_ms(self) -> float:
        """Milliseconds of one pass."""
        return self.predicted_ms / self.n_passes

    @property
    def n_rows(self) -> int:
        """Rows of all passes."""
        return self.n_passes * self.work.decode_rows + self.work.prefill_tokens


def plan(tick: Tick) -> Plan:
    """Choose what the next tick computes.

    Every decoding sequence gets one token.  Only background sequences wait for others (``_without_background``).

    Prefill gets as many tokens as the tick is predicted to have time for before the earliest deadline of the decodes.
    If not even the smallest chunk fits, every other tick has such a chunk and is late: neither prefill nor decoding
    starves.  Where decoding alone is late, or prompts are overdue, prompts get a share of the time in every tick.
    Without decodes, prefill can take ``prefill_tick_ms``.  What rules the length of
    chunks: ``PrefillBudget`` (the time), ``choose_prefill`` (tiles, calls of their own, recording) with
    ``fairness.divide`` (the shares), and ``pause`` of the sequence's ``view`` (where a checkpoint is).

    Without prefill, draft tokens are verified if that is predicted to give more tokens in the same time.  Now and then
    they are verified anyway, to learn whether they pay by now.

    Returns:
        A plan of at most ``max_tokens`` rows, besides those of a picture that is computed whole.  It is empty only if
        nothing is ready.

    Two sequences are due in 30 ms and two prompts wait, on a device that takes 2 ms for a tick and 1 ms for each token:

    >>> from uma_trio.config import Scheduling
    >>> from uma_trio.daemon.policy.cost import CostModel, LinearModel
    >>> model = LinearModel((2.0, 100.0, 10.0, 0.0, 0.0))
    >>> chosen = plan(Tick([SequenceView(0, due_s=0.030), SequenceView(1, due_s=0.030)],
    ...                    [SequenceView(2, n_pending=10), SequenceView(3, n_pending=100)], PolicyState(),
    ...                    now_s=0.0, cost=CostModel(model, model), max_tokens=512,
    ...                    settings=Scheduling(prefill_burst_tokens=16)))
    >>> [view.seq_id for view in chosen.decodes], [(chunk.seq_id, chunk.n_tokens) for chunk in chosen.chunks]
    ([0, 1], [(2, 10), (3, 16)])
    """
    tick, background_skips = _without_background(tick)
    state = tick.state
    if background_skips != state.background_skips:
        state = attrs.evolve(state, background_skips=background_skips)
    chosen = _plan_with_prefill(tick, state) if tick.prefills else None
    return _plan_without_prefill(tick, state) if chosen is None else chosen


def repeated(chosen: Plan, most: int, longest_ms: float) -> Plan:
    """``chosen``, which only decodes, with up to ``most`` passes that together take ``longest_ms`` at most."""
    n = min(most, int(longest_ms / max(chosen.predicted_ms, 1e-6)))
    if n <= 1:
        return chosen
    service = chosen.state.service.decoded(chosen.decodes, n - 1)
    state = attrs.evolve(chosen.state, service=service)
    return attrs.evolve(chosen, n_passes=n, state=state, predicted_ms=n * chosen.predicted_ms)


def _plan_with_prefill(tick: Tick, state: PolicyState) -> Plan | None:
    """The plan of a tick with prompts; ``None`` if there is no time for them."""
    decodes = tick.decodes
    separately = bool(decodes) and not tick.mixes_prefill
    # Prefill in the same call: splitting the decodes would read the weights once more for each call.
    widths = _split(tick, consecutive_ids=True) if separately else (len(decodes),)
    # the second of several decode calls that are alike; a prompt of its own call does not come between them
    is_recorded = tick.records_calls and separately and len(decodes) == state.n_decodes and state.n_alike == 1
    work = attrs.evolve(_decode_work(tick, widths), n_calls=len(widths) + separately, is_recorded=is_recorded)
    given, work, service = choose_prefill(tick, work)
    if not given:
        return None
    chunks = tuple([PrefillChunk(view.seq_id, n, n == view.n_pending) for view, n in given])
    after = attrs.evolve(state, service=service).after_decode(decodes)
    after = attrs.evolve(after, prefill_rows=len(decodes) + work.prefill_tokens)
    return Plan(decodes, chunks, after, work, tick.cost.predict(work), widths, separately)


def _plan_without_prefill(tick: Tick, state: PolicyState) -> Plan:
    """The plan of a tick that decodes only, with draft tokens if they pay."""
    decodes, cost = tick.decodes, tick.cost
    after = state.after_decode(decodes)
    widths = _split(tick, consecutive_ids=not tick.mixes_prefill)
    work = _decode_work(tick, widths)
    if len(widths) != 1:
        work = attrs.evolve(work, n_calls=len(widths))
    if not any(view.n_drafts for view in decodes):
        return Plan(decodes, (), after, work, cost.predict(work), widths)
    drafts, verified, draft_ms = _choose_drafts(tick, work, tries=state.n_without_drafts >= TICKS_WITHOUT_DRAFTS)
    if not drafts:
        after = attrs.evolve(after, n_without_drafts=state.n_without_drafts + 1)
        return Plan(decodes, (), after, work, cost.predict(work), widths)
    return Plan(
        decodes,
        (),
        attrs.evolve(after, n_without_drafts=0),
        verified,
        cost.predict(verified) + draft_ms,
        (len(decodes),),
        drafts=drafts,
        min_draft_probability=_min_probability(tick, work),
    )


# -- decodes ------------------------------------------------------------------------------------------


def _without_background(tick: Tick) -> tuple[Tick, int]:
    """``tick`` without the background sequences that wait, and for how many ticks in a row some have waited.

    Next to others, background sequences make ticks longer by at most ``background_share``.  Where all of their decodes
    fit into that, they are in every tick.  Otherwise they wait for their turn: one tick that is longer, after so many
    without them that the share is kept.  So the gaps of others hardly change, and background sequences do not starve.
    """
    decodes, prefills, skips, share = (
        tick.decodes,
        tick.prefills,
        tick.state.background_skips,
        tick.settings.background_share,
    )
    streams, prompts = foreground(decodes), foreground(prefills)
    waits = len(prompts) < len(prefills)
    if not waits and len(streams) == len(decodes):
        return tick, 0
    if not streams and not prompts:
        return msgspec.structs.replace(tick, longest_ms=BACKGROUND_TICK * tick.settings.target_itl_ms), 0
    stretch, longest_ms = 0.0, math.inf
    if streams:
        alone_ms = max(tick.cost.predict(estimated_work(streams, tick.attention)), 1e-6)
        stretch = tick.cost.predict(estimated_work(decodes, tick.attention)) / alone_ms - 1
        longest_ms = MAX_BACKGROUND_STRETCH * alone_ms
    if skips * share >= max(stretch, MAX_BACKGROUND_STRETCH):
        turn = [view for view in prefills if view.priority is Priority.BACKGROUND] if waits else prompts
        return msgspec.structs.replace(tick, prefills=turn, longest_ms=longest_ms), 0
    if streams and stretch <= share:
        return msgspec.structs.replace(tick, prefills=prompts), skips + 1 if waits else 0
    return msgspec.structs.replace(tick, decodes=streams, prefills=prompts), skips + 1


def _split(tick: Tick, *, consecutive_ids: bool) -> tuple[int, ...]:
    """Split the decodes, in order, into the calls that are predicted to be fastest; returns the decodes of each call.

    Args:
        consecutive_ids: whether llama.cpp computes only rows with consecutive sequence ids together (per-sequence KV).
    """
    views, is_padded = tick.decodes, tick.attention.scan is AttentionScan.LONGEST
    at, calls = 0, []
    for run in runs_of_consecutive_ids(views) if consecutive_ids else (len(views),):
        contexts = [view.n_context for view in views[at : at + run]] if is_padded else ()
        calls.append(tick.cost.split(run, contexts))
        at += run
    return tuple(join_runs(views, calls, tick.cost, tick.fillers, tick.attention))


def _decode_work(tick: Tick, widths: Sequence[int]) -> Work:
    """The work of the decodes in calls of ``widths``, filler rows included; counted as one call."""
    views, attention = tick.decodes, tick.attention
    if attention.scan is not AttentionScan.LONGEST and not tick.fillers:
        return estimated_work(views, attention)
    rows = total = at = 0
    for width in widths:
        contexts = contexts_with_fillers(views[at : at + width], tick.fillers)
        rows += len(contexts)
        total += attention.decode_context(len(contexts), sum(contexts), max(contexts, default=0))
        at += width
    return Work(0, rows, total)


# -- drafts -------------------------------------------------------------------------------------------


def _choose_drafts(tick: Tick, work: Work, *, tries: bool) -> tuple[Sequence[int], Work, float]:
    """Choose how many draft tokens of each sequence to verify, so that the tick gives the most tokens a millisecond.

    Args:
        work: of the decodes without draft tokens.
        tries: verify some even if that is predicted not to pay, as far as the deadlines allow.

    Returns:
        Draft tokens of each decode, empty if none are to be verified; the work with them; the milliseconds of the draft
        model.
    """
    decodes, cost, gap_ms = tick.decodes, tick.cost, tick.gap_ms
    work = attrs.evolve(work, n_calls=1)  # more calls are as fast at least
    best_rate = 0.0 if tries else MIN_DRAFT_SPEEDUP * len(decodes) / max(cost.predict(work) + gap_ms, 1e-6)
    best: Sequence[int] = ()
    verified, best_draft_ms = work, 0.0
    most = sum([_expected_tokens(view.acceptance_rate, view.n_drafts) for view in decodes])
    if most <= best_rate * (cost.predict(attrs.evolve(work, decode_rows=len(decodes) + 1)) + gap_ms):
        return best, verified, best_draft_ms  # the usual case: nothing can be foreseen
    left_ms = tick.due_ms
    n_missing = sum([view.n_missing for view in decodes if view.drafts_by_model])
    for length in DRAFT_LENGTHS:
        drafts = [min(view.n_drafts, length) for view in decodes]
        if len(decodes) + sum(drafts) > tick.max_tokens:
            break
        proposed = [_expected_drafts(view, n) for n, view in zip(drafts, decodes, strict=True)]
        by_model = [n for n, view in zip(proposed, decodes, strict=True) if n and view.drafts_by_model]
        draft_ms = tick.draft_cost.ms(max(by_model), 0) if by_model else 0.0
        missing_ms = tick.draft_cost.ms(0, n_missing) if by_model else 0.0  # all drafts of the answer need these tokens
        rows = len(decodes) + math.ceil(sum(proposed))
        total = round(sum([(1 + n) * view.n_context for n, view in zip(proposed, decodes, strict=True)]))
        context = tick.attention.decode_context(rows, total, max([view.n_context for view in decodes]))
        with_drafts = attrs.evolve(work, decode_rows=rows, context_tokens=context)
        ms = cost.predict(with_drafts) + draft_ms
        if ms + missing_ms > left_ms:
            break
        tokens = sum([_expected_tokens(view.acceptance_rate, n) for n, view in zip(drafts, decodes, strict=True)])
        if tokens > best_rate * (ms + gap_ms):
            best_rate, best, best_draft_ms = tokens / max(ms + gap_ms, 1e-6), tuple(drafts), draft_ms + missing_ms
            verified = with_drafts
        if max(view.n_drafts for view in decodes) <= length:
            break
    return best, verified, best_draft_ms


def _min_probability(tick: Tick, work: Work) -> float:
    """The probability at which one more draft token costs as much as it saves, next to ``work`` of the decodes alone."""
    cost, n = tick.cost, len(tick.decodes)
    plain_ms = cost.predict(work)
    row_ms = cost.predict(attrs.evolve(work, decode_rows=work.decode_rows + 1)) - plain_ms
    low, high = DRAFT_PROBABILITIES
    return min(high, max(low, (n * row_ms + tick.draft_cost.call_ms) / max(plain_ms, 1e-6)))


def _expected_drafts(view: SequenceView, n: int) -> float:
    """How many of ``n`` draft tokens are proposed: the draft model mostly ends its draft before a wrong one."""
    if not n or not view.drafts_by_model:
        return float(n)
    return min(n, _expected_tokens(view.acceptance_rate, n - 1) / max(view.draft_precision, 1 / n))


def _expected_tokens(acceptance_rate: float, n_drafts: int) -> float:
    """Expected tokens of a sequence that verifies ``n_drafts``, if each one is accepted independently."""
    p = acceptance_rate
    return (1 - p ** (n_drafts + 1)) / (1 - p) if p < 1 else n_drafts + 1.0
