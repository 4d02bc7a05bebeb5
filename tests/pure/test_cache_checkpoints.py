"""Prefix reuse in a memory that cannot be truncated: where checkpoints are saved, shared and restored."""

from __future__ import annotations

import numpy as np

from tests.support.cases import all_cases
from tests.support.kv_cache import (
    ANSWER,
    BACKGROUND,
    HELLO,
    LONG,
    MORE,
    NORMAL,
    OTHER,
    SYSTEM,
    Got,
    advance,
    asked,
    done,
    followed,
    make_cache,
    next_pause,
    pauses,
    place,
    placed,
    release,
    together,
    tokens,
    uncuttable,
)
from uma_trio.daemon.kv.checkpoints import MIN_SPACING, TOKENS_AFTER_LAST
from uma_trio.engine_link.kv_ops import MAX_CHECKPOINTS, CopyPrefix, DropCheckpoint, SaveCheckpoint, Truncate


def test_requests_continue_from_checkpoints() -> None:
    """There is one shortly before the end of each prompt, and one where each turn began."""
    cache = make_cache(can_truncate=False, max_checkpoints=20)
    first = tokens(SYSTEM, HELLO)
    held = tokens(first, ANSWER)
    assert asked(cache, first, ANSWER) == (0, (SaveCheckpoint(0, 1),))
    assert asked(cache, first, ANSWER) == (100 - TOKENS_AFTER_LAST, (Truncate(0, 92, 1),)), "the same prompt again"
    second = tokens(held, LONG[:100])
    answer = tokens(ANSWER, range(20))
    assert asked(cache, second, answer) == (150, (SaveCheckpoint(0, 2),)), (
        "the turn before ended too close to the last checkpoint"
    )
    assert asked(cache, tokens(second, answer, OTHER), 9) == (320, (SaveCheckpoint(0, 3),)), "where a turn begins"
    assert asked(cache, tokens(second, answer, MORE), 9) == (320, (Truncate(0, 320, 3),)), "the last turn was rewritten"
    assert asked(cache, tokens(second, MORE), 9) == (242, (Truncate(0, 242, 2), DropCheckpoint(3))), (
        "the template dropped the thoughts"
    )
    cache.check_integrity()


def test_a_copy_shares_the_checkpoints_of_its_source() -> None:
    cache = make_cache(can_truncate=False, max_checkpoints=20)
    first = tokens(SYSTEM, HELLO)
    asked(cache, first, LONG)
    assert asked(cache, tokens(first, OTHER), 9) == (92, (CopyPrefix(0, 1, 92, 1),))
    cache.offload.forget(tokens(first, LONG), principal="", needed=lambda _: False)
    assert cache.take_ops() == (Truncate(0),), "the copy still refers to the checkpoint"
    cache.offload.forget(tokens(first, OTHER, 9), principal="", needed=lambda _: False)
    assert cache.take_ops() == (Truncate(1), DropCheckpoint(1))


@all_cases("most", [1, 3, 1000])
def test_the_number_of_checkpoints_is_limited(most: int) -> None:
    """A sequence keeps its first and its latest ones; the longest idle sequence loses one first."""
    cache = make_cache(can_truncate=False, max_checkpoints=most)
    story = tokens(SYSTEM, HELLO)
    for turn in range(2 * MAX_CHECKPOINTS):
        asked(cache, story, range(MIN_SPACING))
        story = tokens(story, range(MIN_SPACING), [turn])
        cache.check_integrity()
    points = [point.length for point in cache._pool.allocations[0].checkpoints]
    assert len(points) == min(most, MAX_CHECKPOINTS)
    if most > 1:
        assert points[0] == 92
    assert points[-1] == len(story) - (MIN_SPACING + 1) - 1, "where the last turn began"
    asked(cache, LONG[:400], [1, 2, 3])
    cache.check_integrity()
    assert [len(allocation.checkpoints) for allocation in cache._pool.allocations.values()] == [
        min(most, MAX_CHECKPOINTS) - (most <= MAX_CHECKPOINTS),
        1,
    ]


def test_a_long_prompt_has_checkpoints_inside_denser_towards_its_end() -> None:
    for length, inside in ((519, []), (520, [256]), (1200, [576, 832]), (6000, [2944, 4416, 5184])):
        cache = uncuttable()
        placed(cache, np.arange(length, dtype=np.int32))
        assert pauses(cache, 0) == [*inside, length - TOKENS_AFTER_LAST]
        cache.check_integrity()


def test_checkpoints_inside_cover_the_new_tokens_only() -> None:
    cache = uncuttable(n_cells=20_000, cells_per_sequence=20_000)
    story = np.arange(3000, dtype=np.int32)
    done(cache, story)
    assert placed(cache, tokens(story, range(1000))).n_cached == 3000
    assert pauses(cache, 0) == [3456, 3712, 3992]


def test_a_durable_request_has_no_checkpoints_inside() -> None:
    cache = uncuttable()
    placed(cache, np.arange(6000, dtype=np.int32), durable=True)
    assert pauses(cache, 0) == [6000 - TOKENS_AFTER_LAST]


def test_a_speculative_checkpoint_displaces_no_other() -> None:
    cache = uncuttable(max_checkpoints=3)
    asked(cache, LONG[:400])
    placed(cache, np.arange(6000, dtype=np.int32))
    assert pauses(cache, 1) == [6000 - TOKENS_AFTER_LAST]
    assert len(cache._pool.allocations[0].checkpoints) == 1


def test_the_second_request_saves_a_checkpoint_where_it_diverges() -> None:
    """The third one continues from there; the first could not know the place."""
    cache = uncuttable()
    system = LONG[:600]
    held = [asked(cache, tokens(system, tail), 9)[0] for tail in (HELLO, ANSWER, MORE, OTHER)]
    assert held == [0, 320, 600, 600]


@all_cases("unified", [True, False])
def test_a_leader_pauses_where_its_followers_diverge(unified: bool) -> None:
    cache = uncuttable(unified=unified, cells_per_sequence=8000 if unified else 1000)
    prompts = [tokens(LONG, part) for part in range(50, 58)]
    computed, _ = together(cache, prompts)
    assert computed == len(LONG) + 8 * 50


def test_equal_requests_wait_for_the_last_checkpoint() -> None:
    computed, _ = together(uncuttable(), [LONG] * 8)
    assert computed == len(LONG) + 7 * TOKENS_AFTER_LAST


def test_requests_that_diverge_one_after_another_compute_each_part_once() -> None:
    cache = uncuttable(n_cells=20_000, cells_per_sequence=20_000)
    ways = [tokens(LONG[:length], range(length, length + 70)) for length in (800, 640, 480, 200)]
    computed, _ = together(cache, ways)
    assert computed == len(LONG) + 4 * 70


def test_a_request_that_is_too_late_for_a_pause_becomes_the_leader_of_the_next() -> None:
    cache = uncuttable()
    prompts = [tokens(LONG, part) for part in (50, 51, 52)]
    placed(cache, prompts[0])
    assert next_pause(cache, 0) == 384
    advance(cache, 0, 384)
    advance(cache, 0, len(LONG) + 10)
    assert placed(cache, prompts[1]) == Got(1, 384)
    assert next_pause(cache, 1) == len(LONG)
    assert placed(cache, prompts[2]).waits
    advance(cache, 1, len(LONG))
    assert followed(cache) == [(2, len(LONG))]


def test_the_number_of_pauses_is_limited() -> None:
    """Later requests share up to one of the existing pauses."""
    cache = make_cache(
        can_truncate=False, max_checkpoints=1000, n_sequences=64, n_cells=200_000, cells_per_sequence=200_000
    )
    story = np.arange(5000, dtype=np.int32)
    placed(cache, story)
    for n in range(40):
        placed(cache, tokens(story[: 5000 - 100 * n], [7, 7, 7]))
    assert len(cache._pool.allocations[0].pauses) == MAX_CHECKPOINTS
    assert len(pauses(cache, 0)) <= MAX_CHECKPOINTS
    while followed(cache):
        cache.take_ops()
    cache.check_integrity()


def test_a_request_does_not_wait_for_a_pause_of_a_lower_class() -> None:
    cache = uncuttable()
    placed(cache, tokens(LONG, 50), rank=BACKGROUND)
    assert not placed(cache, tokens(LONG, 51), rank=NORMAL).waits
    assert placed(cache, tokens(LONG, 52), rank=BACKGROUND).waits


def test_without_a_checkpoint_only_whole_sequences_are_kept() -> None:
    cache = make_cache(can_truncate=False)
    place(cache, tokens(SYSTEM), 100)
    advance(cache, 0, 60)
    release(cache, 0, tokens(SYSTEM))
    assert cache.statistics().cached_sequences == 0
    assert cache.take_ops() == (Truncate(0),)


def test_a_copy_restores_the_checkpoint_where_the_source_may_have_grown() -> None:
    """The engine copies after the running step, which may append to the source."""
    cache = uncuttable()
    placed(cache, tokens(LONG, 50))
    pause = next_pause(cache, 0)
    advance(cache, 0, pause)
    assert placed(cache, tokens(LONG[:pause], 51)) == Got(1, pause)
    assert cache.take_ops() == (SaveCheckpoint(0, 1), CopyPrefix(0, 1, pause)), "no step has run in between"
    assert placed(cache, tokens(LONG[:pause], 52)) == Got(2, pause)
    assert cache.take_ops() == (CopyPrefix(0, 2, pause, 1),)
    cache.check_integrity()
