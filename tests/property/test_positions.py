"""Positions of tokens where pictures take fewer than they have rows: any history of sequences, next to plain counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.encoder.encoded import RowBlock, placeholders
from uma_trio.engine.media_calls import split_by_media
from uma_trio.engine.positions import Positions
from uma_trio.engine_link.media import PLACEHOLDER, STANDING, MediaRows, before_picture, standing_runs
from uma_trio.engine_link.messages import StepInput

SHAPES = [(1, 1), (4, 3), (2, 7), (5, 1)]
"""Columns and lines of pictures."""
PARTS = st.lists(st.integers(1, 5) | st.sampled_from(SHAPES), min_size=1, max_size=6)
"""Texts of so many tokens, and pictures."""


def tokens_of(parts: list[int | tuple[int, int]]) -> tuple[list[int], list[tuple[int, RowBlock]]]:
    """Tokens, and where the pictures begin."""
    tokens: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            tokens += [7] * part
            continue
        columns, lines = part
        block = RowBlock(columns * lines, columns=columns)
        pictures.append((len(tokens), block))
        tokens += placeholders(bytes(range(32)), [block]).tolist()
    return tokens, pictures


def position(tokens: list[int], length: int) -> int:
    """By counting."""
    return sum(token < STANDING for token in tokens[:length])


def inputs_of(parts: list[int | tuple[int, int]], start: int, end: int) -> list[StepInput]:
    """The calls of a chunk of a prompt."""
    tokens, pictures = tokens_of(parts)
    media = []
    for at, block in pictures:
        begin, stop = max(start, at), min(end, at + block.n)
        if begin < stop:
            media.append(MediaRows(begin - start, stop - begin, 0, 0, columns=block.columns, row=begin - at))
    chunk = StepInput(0, start, tokens[start:end], media=media)
    return [each for call in split_by_media([chunk]) for each in call]


@given(PARTS, st.data())
def test_every_chunk_is_where_counting_says(parts: list[int | tuple[int, int]], data: st.DataObject) -> None:
    tokens, _ = tokens_of(parts)
    assert position(tokens, len(tokens)) == sum(part if isinstance(part, int) else max(part) for part in parts), (
        "a picture takes as many positions as it is wide or high"
    )
    found, start = Positions(), 0
    while start < len(tokens):
        end = data.draw(st.integers(start + 1, len(tokens)))
        for each in inputs_of(parts, start, end):
            [placed] = found.place([each])
            rows = each.media[0].row if each.media else 0
            assert placed.position == position(tokens, each.position - rows)
        start = end
        assert found.of(0, start) == position(tokens, start)
    # a state that is loaded, a copy, and what is cut off
    found.set(1, standing_runs(np.array(tokens, np.int32)))
    length = before_picture(np.array(tokens, np.int32), data.draw(st.integers(0, len(tokens))))
    found.copy(1, 2, length)
    found.cut(0, length)
    for seq_id in (0, 1, 2):
        for n in range(length + 1):
            assert found.of(seq_id, n) == position(tokens, n)
    assert found.of(2, length + 5) == found.of(0, length + 5) == position(tokens, length) + 5
    found.set(1, [])
    assert found.of(1, len(tokens)) == len(tokens)


@given(PARTS, st.data())
def test_no_picture_is_cut(parts: list[int | tuple[int, int]], data: st.DataObject) -> None:
    tokens, _ = tokens_of([1, *parts])
    length = data.draw(st.integers(0, len(tokens)))
    cut = before_picture(np.array(tokens, np.int32), length)
    assert cut <= length
    assert all(token >= PLACEHOLDER for token in tokens[cut:length])
    assert cut in (0, length) or tokens[cut - 1] < PLACEHOLDER or tokens[cut] < PLACEHOLDER
