"""Gaps in the sequence ids of decodes: with per-sequence KV each gap is a reason for another call, or for filler rows.

llama.cpp computes only rows of consecutive ids together.  The engine can add a row for each id that is missing, and
removes its token right after the call.  That is worth it where a row costs less than a call: nearly always on a GPU, and
seldom on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from uma_trio.daemon.policy.cost import CostModel
from uma_trio.daemon.policy.view import SequenceView
from uma_trio.engine_link.attention import Attention

NO_FILLERS: Final[Mapping[int, int]] = MappingProxyType({})
"""The engine adds no rows."""

_Rows: TypeAlias = tuple[int, int, int]
"""Rows of a call: their number, the sum of their context lengths, and the longest."""


def runs_of_consecutive_ids(views: Sequence[SequenceView]) -> tuple[int, ...]:
    """Lengths of the runs of consecutive sequence ids, in order."""
    if len(views) < 2 or views[-1].seq_id - views[0].seq_id == len(views) - 1:
        return (len(views),)
    starts = [n for n in range(1, len(views)) if views[n].seq_id != views[n - 1].seq_id + 1]
    return tuple([end - start for start, end in zip([0, *starts], [*starts, len(views)], strict=True)])


def contexts_with_fillers(views: Sequence[SequenceView], fillers: Mapping[int, int]) -> list[int]:
    """Context lengths of the rows of one call, those of its filler rows included.

    Args:
        fillers: the sequences that may get a filler row: the tokens that each holds, by sequence id.
    """
    contexts = [view.n_context for view in views]
    if fillers and len(views) > 1 and views[-1].seq_id - views[0].seq_id >= len(views):
        own = {view.seq_id for view in views}
        between = range(views[0].seq_id, views[-1].seq_id)
        contexts += [fillers[seq_id] for seq_id in between if seq_id not in own and seq_id in fillers]
    return contexts


def join_runs(
    views: Sequence[SequenceView],
    runs: Sequence[Sequence[int]],
    cost: CostModel,
    fillers: Mapping[int, int],
    attention: Attention,
) -> list[int]:
    """Join neighbouring runs of consecutive ids into one call where that is predicted to be faster.

    Args:
        views: by sequence id.
        runs: the calls of each run, as their numbers of views.
        fillers: the sequences that may get a filler row: the tokens that each holds, by sequence id.

    Returns:
        Views of each call.
    """
    if len(runs) < 2 or not fillers:
        return [width for calls in runs for width in calls]
    price = cost.call_price(views[-1].seq_id - views[0].seq_id + 1)

    def ms_of(rows: _Rows) -> float:
        return price(rows[0], attention.decode_context(*rows))

    widths: list[int] = []  # of calls that are settled
    last_calls: Sequence[int] = ()  # those that may be joined with the next run
    last_rows, last_ms, at = _rows([]), 0.0, 0
    for calls in runs:
        rows, calls_ms, gap = _rows([]), 0.0, range(views[at - 1].seq_id + 1 if at else 0, views[at].seq_id)
        for width in calls:
            of_call = _rows([view.n_context for view in views[at : at + width]])
            rows, calls_ms, at = _together(rows, of_call), calls_ms + ms_of(of_call), at + width
        if last_calls and all(seq_id in fillers for seq_id in gap):
            joined = _together(last_rows, _rows([fillers[seq_id] for seq_id in gap]), rows)
            if (joined_ms := ms_of(joined)) < last_ms + calls_ms:
                last_calls, last_rows, last_ms = [sum(last_calls) + sum(calls)], joined, joined_ms
                continue
        widths += last_calls
        last_calls, last_rows, last_ms = calls, rows, calls_ms
    return [*widths, *last_calls]


def _rows(contexts: Sequence[int]) -> _Rows:
    return len(contexts), sum(contexts), max(contexts, default=0)


def _together(*parts: _Rows) -> _Rows:
    return sum([n for n, _, _ in parts]), sum([total for _, total, _ in parts]), max([most for _, _, most in parts])
