"""A call of ``llama_decode`` takes tokens or rows of embeddings, never both: splits a call where it has both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from uma_trio.engine_link.messages import StepInput


def split_by_media(inputs: Sequence[StepInput]) -> Sequence[Sequence[StepInput]]:
    """Split one call into calls of tokens, and calls that have rows of one file each.

    Returns:
        Calls with the same tokens in the same order.  An input with ``media`` is alone in its call, all of its tokens are
        rows, and it has one element there.
    """
    if not [each for each in inputs if each.media]:
        return (inputs,)
    calls: list[list[StepInput]] = [[]]
    for each in inputs:
        for part in _parts(each):
            if part.media:
                calls += [[part], []]
            else:
                calls[-1].append(part)
    return [call for call in calls if call]


def _parts(each: StepInput) -> Iterator[StepInput]:
    """``each``, cut where rows begin and end.  The last part has its samples."""
    at, n_tokens = 0, len(each.tokens)
    for rows in each.media:
        if at < rows.at:
            yield _part(each, at, rows.at)
        at = rows.at + rows.n
        yield msgspec.structs.replace(_part(each, rows.at, at), media=(rows,))
    if at < n_tokens:
        yield _part(each, at, n_tokens)


def _part(each: StepInput, start: int, end: int) -> StepInput:
    is_last = end == len(each.tokens)
    return msgspec.structs.replace(
        each,
        position=each.position + start,
        tokens=each.tokens[start:end],
        samples=each.samples if is_last else (),
        media=(),
    )
