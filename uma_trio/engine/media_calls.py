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
    if not [step_input for step_input in inputs if step_input.media]:
        return (inputs,)
    calls: list[list[StepInput]] = [[]]
    for step_input in inputs:
        for part in _parts(step_input):
            if part.media:
                calls += [[part], []]
            else:
                calls[-1].append(part)
    return [call for call in calls if call]


def _parts(step_input: StepInput) -> Iterator[StepInput]:
    """``step_input``, cut where rows begin and end.  The last part has its samples."""
    at, n_tokens = 0, len(step_input.tokens)
    for rows in step_input.media:
        if at < rows.at:
            yield _part(step_input, at, rows.at)
        at = rows.at + rows.n
        yield msgspec.structs.replace(_part(step_input, rows.at, at), media=(rows,))
    if at < n_tokens:
        yield _part(step_input, at, n_tokens)


def _part(step_input: StepInput, start: int, end: int) -> StepInput:
    is_last = end == len(step_input.tokens)
    return msgspec.structs.replace(
        step_input,
        position=step_input.position + start,
        tokens=step_input.tokens[start:end],
        samples=step_input.samples if is_last else (),
        media=(),
    )
