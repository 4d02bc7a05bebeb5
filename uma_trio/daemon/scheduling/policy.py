"""Plans the next tick: one token for every decoding sequence, then prefill in the time that is left.

``plan`` is a pure function of a ``Tick``: the sequences that are ready, the state after the previous plan, the cost model.

Source: docs/design/scheduler.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import msgspec

from uma_trio.config import Scheduling
from uma_trio.daemon.scheduling import fairness
from uma_trio.daemon.scheduling.cost import CostModel, DraftCost, Work
from uma_trio.daemon.scheduling.fairness import Service
from uma_trio.daemon.scheduling.gaps import NO_FILLERS, contexts_with_fillers, join_runs, runs_of_consecutive_ids
from uma_trio.daemon.scheduling.view import Priority, SequenceView, foreground
from uma_trio.engine_link.attention import Attention, AttentionScan

MAX_FURTHER_CALL: Final = 1.1
"""A second prompt begins in the tick in which another one ends only if the tick gets at most this many times longer."""

MAX_BACKGROUND_STRETCH: Final = 4.0
"""A tick in which it is the turn of background sequences takes at most this many times as long as without them."""

BACKGROUND_TICK: Final = 0.5
"""Length of a tick with background sequences alone, as a share of ``target_itl_ms``: a new request waits for its end."""

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

DRAFT_LENGTHS: Final = (1, 2, 4, 8, 16, 32)
"""Draft tokens for each sequence that the policy considers."""

DRAFT_PROBABILITIES: Final = (0.1, 0.9)
"""Bounds of ``Plan.min_draft_probability``."""

MIN_DRAFT_SPEEDUP: Final = 1.05
"""Draft tokens are verified only if the tick then gives at least this many times as many tokens a millisecond."""

TICKS_WITHOUT_DRAFTS: Final = 64
"""After this many ticks in a row that could have had draft tokens and had none, one tick has some, although it is predicted to
give fewer tokens a millisecond.  Otherwise the cost model would not learn that drafts have become cheaper or better."""


OWN_CONTEXTS: Final = Attention()
"""``AttentionScan.SEQUENCE``: each row scans the cells of its own sequence."""

NO_DRAFT_MODEL: Final = DraftCost()


@attrs.frozen
class PrefillChunk:
    """The part of a prompt that one tick computes."""

    seq_id: int
    n_tokens: int
    is_last: bool
    """Completes the prompt.  Only the last chunk needs logits."""


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
    min_draft_probability: float = 0.0
    """The draft model ends a draft when the probability that all of it is right falls below this: more would not pay."""


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
    limits: Scheduling
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


def plan(tick: Tick) -> Plan:
    """Choose what the next tick computes.

    Every decoding sequence gets one token.  Only background sequences wait for others (``_without_background``).

    Prefill gets as many tokens as the tick is predicted to have time for before the earliest deadline of the decodes.
    If not even the smallest chunk fits, every other tick has such a chunk and is late: neither prefill nor decoding
    starves.  Where decoding alone is late, or prompts are overdue, prompts get a share of the time in every tick.
    Without decodes, prefill can take ``prefill_tick_ms``.  What rules the length of
    chunks: ``prefill_budget`` (the time), ``_choose_prefill`` (tiles, calls of their own, recording) with
    ``fairness.divide`` (the shares), and ``pause`` of the sequence's ``view`` (where a checkpoint is).

    Without prefill, draft tokens are verified if that is predicted to give more tokens in the same time.  Now and then
    they are verified anyway, to learn whether they pay by now.

    Returns:
        A plan of at most ``max_tokens`` rows, besides those of a picture that is computed whole.  It is empty only if
        nothing is ready.

    Two sequences are due in 30 ms and two prompts wait, on a device that takes 2 ms for a tick and 1 ms for each token:

    >>> from uma_trio.daemon.scheduling.cost import LinearModel
    >>> model = LinearModel((2.0, 100.0, 10.0, 0.0, 0.0))
    >>> chosen = plan(Tick([SequenceView(0, due_s=0.030), SequenceView(1, due_s=0.030)],
    ...                    [SequenceView(2, n_pending=10), SequenceView(3, n_pending=100)], PolicyState(),
    ...                    now_s=0.0, cost=CostModel(model, model), max_tokens=512,
    ...                    limits=Scheduling(prefill_burst_tokens=16)))
    >>> [view.seq_id for view in chosen.decodes], [(chunk.seq_id, chunk.n_tokens) for chunk in chosen.chunks]
    ([0, 1], [(2, 10), (3, 16)])
    """
    tick, background_skips = _without_background(tick)
    state = attrs.evolve(tick.state, background_skips=background_skips)
    chosen = _plan_with_prefill(tick, state) if tick.prefills else None
    return _plan_without_prefill(tick, state) if chosen is None else chosen


def _plan_with_prefill(tick: Tick, state: PolicyState) -> Plan | None:
    """The plan of a tick with prompts; ``None`` if there is no time for them."""
    tick = _with_one_whole(tick)
    decodes = tick.decodes
    separately = bool(decodes) and not tick.mixes_prefill
    # Prefill in the same call: splitting the decodes would read the weights once more for each call.
    widths = _split(tick, consecutive_ids=True) if separately else (len(decodes),)
    # the second of several decode calls that are alike; a prompt of its own call does not come between them
    is_recorded = tick.records_calls and separately and len(decodes) == state.n_decodes and state.n_alike == 1
    work = attrs.evolve(_decode_work(tick, widths), n_calls=len(widths) + separately, is_recorded=is_recorded)
    given, work, service = _choose_prefill(tick, work)
    if not given:
        return None
    given, work, service = _completed(tick, given, work, service)
    chunks = tuple([PrefillChunk(view.seq_id, n, n == view.n_pending) for view, n in given])
    after = attrs.evolve(state, service=service).after_decode(decodes)
    after = attrs.evolve(after, prefill_rows=len(decodes) + work.prefill_tokens)
    return Plan(decodes, chunks, after, work, tick.cost.predict(work), widths, separately)


def _plan_without_prefill(tick: Tick, state: PolicyState) -> Plan:
    """The plan of a tick that decodes only, with draft tokens if they pay."""
    decodes, cost = tick.decodes, tick.cost
    after = state.after_decode(decodes)
    widths = _split(tick, consecutive_ids=not tick.mixes_prefill)
    work = attrs.evolve(_decode_work(tick, widths), n_calls=len(widths))
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
        tick.limits.background_share,
    )
    streams, prompts = foreground(decodes), foreground(prefills)
    waits = len(prompts) < len(prefills)
    if not waits and len(streams) == len(decodes):
        return tick, 0
    if not streams and not prompts:
        return msgspec.structs.replace(tick, longest_ms=BACKGROUND_TICK * tick.limits.target_itl_ms), 0
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


def estimated_work(decodes: Sequence[SequenceView], attention: Attention = OWN_CONTEXTS) -> Work:
    """What a tick with these decodes alone computes, in one call."""
    return Work(0, len(decodes), _context(decodes, attention))


def _context(views: Sequence[SequenceView], attention: Attention) -> int:
    """Cells that the rows of ``views`` scan.  With ``AttentionScan.LONGEST`` this assumes calls of equal contexts."""
    if attention.scan is AttentionScan.CACHE:
        return len(views) * attention.cells_scanned
    return sum([view.n_context for view in views])


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


# -- prefill ------------------------------------------------------------------------------------------


def _choose_prefill(tick: Tick, work: Work) -> tuple[list[tuple[SequenceView, int]], Work, Service]:
    """Choose which prompts advance next to the decodes, and by how many tokens.

    The budget (``prefill_budget``) is what prompts get together.  It is rounded down so that the rows of the call fill
    tiles (``ROW_ALIGNMENT``), then divided between prompts (``fairness.divide``).  On a device that records calls, one
    token is left out where the call would be like the one before.

    Args:
        work: of the decodes alone.

    Returns:
        Each prompt that advances with its number of tokens, ``work`` with these tokens, and the service after them.
    """
    prefills, cost, limits, n_decodes = tick.prefills, tick.cost, tick.limits, len(tick.decodes)
    # The budget depends on the context before the chunks, and which prompts advance is not known yet.  So start from the
    # mean over all of them.
    mean_context = tick.attention.prefill_context(sum([view.n_context for view in prefills]) / len(prefills))
    work = attrs.evolve(work, mean_prefill_context=mean_context)
    overdue = _overdue(tick)
    budget = _prefill_budget(tick, work, overdue)
    if MIN_ALIGNED_TOKENS <= budget < sum([view.n_pending for view in prefills]):
        aligned = budget - (budget + n_decodes if tick.mixes_prefill else budget) % ROW_ALIGNMENT
        budget = aligned if aligned >= limits.min_chunk_tokens else budget
    n_calls = work.n_calls
    while True:  # the chosen prompts may have more context than the mean, so less fits; mostly one round is enough
        given, service = _divide(tick, budget)
        work = _with_prefill(tick, work, given, n_calls=n_calls)
        rest = _rest_in_a_call_of_its_own(given, limits) if n_decodes and not tick.mixes_prefill else 0
        if rest and cost.predict(work) > MAX_FURTHER_CALL * cost.predict(attrs.evolve(work, n_calls=n_calls)):
            given, service = _divide(tick, budget - rest)
            work = _with_prefill(tick, work, given, n_calls=n_calls)
        budget = _prefill_budget(tick, work, overdue)
        if tick.records_calls and _would_be_recorded(given, n_decodes + work.prefill_tokens, tick.state):
            budget = min(budget, work.prefill_tokens - 1)
        if budget >= work.prefill_tokens:
            return given, work, service


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
    given = [(each, m + rest if each is view else m) for each, m in given]
    service = service.charged({view.principal: rest / view.weight})
    return given, _with_prefill(tick, work, given, n_calls=work.n_calls + 1), service


def _rest_in_a_call_of_its_own(given: Sequence[tuple[SequenceView, int]], limits: Scheduling) -> int:
    """Tokens of the last chunk, if it begins a prompt after the end of another long one of its group; otherwise 0.

    With per-sequence KV, llama.cpp computes chunks of different lengths one after another.  After short prompts, which may
    come in every tick, a long one does not wait.  Nor does that of another principal, or of another class: each has its own
    share of the tick, and would get it in a chunk of another length.
    """
    if not given:
        return 0
    *others, (last, n) = given
    is_long = any(m > limits.prefill_burst_tokens for _, m in others)
    end = all(m == view.n_pending and m != n for view, m in others)
    one_group = len({(view.priority, view.principal) for view, _ in given}) == 1
    enough = sum([m for _, m in others]) >= limits.min_chunk_tokens
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
    found = [
        view for view in tick.prefills if view.n_pending <= tick.max_tokens and view.due_s + view.grace_s < tick.now_s
    ]
    if not found:
        return found
    highest: dict[str, Priority] = {}
    for view in tick.decodes:
        highest[view.principal] = min(highest.get(view.principal, Priority.BACKGROUND), view.priority)
    only_background = all(priority is Priority.BACKGROUND for priority in highest.values())
    return [
        view
        for view in found
        if view.priority <= highest.get(view.principal, Priority.BACKGROUND)
        and (view.priority is not Priority.BACKGROUND or only_background)
    ]


def _prefill_budget(tick: Tick, work: Work, overdue: Sequence[SequenceView]) -> int:
    """``prefill_budget`` of a tick."""
    return prefill_budget(
        tick.cost,
        tick.limits,
        work,
        estimated_work(tick.decodes, tick.attention),
        due_ms=tick.due_ms,
        max_tokens=tick.max_tokens,
        n_prompts=len(tick.prefills),
        overdue=[view.n_pending for view in overdue],
        follows_prefill=tick.state.prefill_rows > 0,
    )


def prefill_budget(
    cost: CostModel,
    limits: Scheduling,
    work: Work,
    alone: Work,
    *,
    due_ms: float,
    max_tokens: int,
    n_prompts: int,
    overdue: Sequence[int] = (),
    follows_prefill: bool = False,
) -> int:
    """Prefill tokens that a tick has time and rows for; not positive if there is no room.

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

    Args:
        work: of the decodes in the calls of a tick with prefill.
        alone: of the decodes in one call.
        due_ms: until the tick has to end; infinite if nobody waits for that.
        max_tokens: rows of the largest batch.
        n_prompts: how many requests wait for their first token.
        overdue: tokens of each prompt whose first token is overdue.
        follows_prefill: the tick before had prefill chunks.
    """
    n_decodes = alone.decode_rows
    if not n_decodes:
        least = limits.min_chunk_tokens * (PREFILL_ONLY_MIN_CHUNKS if due_ms == math.inf else 1)
        return int(min(max_tokens, max(least, cost.max_prefill_tokens(min(due_ms, limits.prefill_tick_ms), work))))
    in_time = cost.max_prefill_tokens(due_ms * (1 - cost.mixed.margin(due_ms)), work)
    if overdue:
        share = min(MAX_OVERDUE_SHARE, OVERDUE_PROMPT_STREAMS * len(overdue) / n_decodes)
        decode_ms = cost.predict(alone)
        late_ms = max((1 + LATE_PREFILL_SHARE) * decode_ms, min((1 + share) * decode_ms, limits.prefill_tick_ms))
        late = cost.max_prefill_tokens(late_ms, work)
        in_time = max(in_time, min(late, max(limits.min_chunk_tokens, sum(overdue))))
    least = max(limits.min_chunk_tokens, limits.prefill_burst_tokens)
    if n_prompts <= n_decodes:
        max_tokens = min(max_tokens, max(SMOOTH_ROWS, n_decodes + least))
        if in_time > least:
            in_time = min(in_time, max(least, cost.worthwhile_prefill_tokens(work, max_tokens - n_decodes)))
    if in_time < limits.min_chunk_tokens:
        in_time = 0 if follows_prefill else limits.min_chunk_tokens
        decode_ms = cost.predict(alone)
        if decode_ms > due_ms:
            late = cost.max_prefill_tokens((1 + LATE_PREFILL_SHARE) * decode_ms, work)
            in_time = late if late >= limits.min_chunk_tokens else in_time
    return int(min(max_tokens - n_decodes, in_time))


def _divide(tick: Tick, budget: int) -> tuple[list[tuple[SequenceView, int]], Service]:
    """The prompts that get ``budget`` tokens, with the tokens of each, and the service after that."""
    service = tick.state.service
    if budget <= 0:
        return [], service
    token_s = 1e-3 * tick.cost.prefill_token_ms
    return fairness.divide(tick.prefills, budget, service, burst=tick.limits.prefill_burst_tokens, token_s=token_s)


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
