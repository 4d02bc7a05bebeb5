"""The KV cache's books: whatever happens, what a request is said to hold are the first tokens of its prompt.

The first part reads as documentation: one case each.  The second runs random requests beside the plainest
engine there is, a dict of token lists to which the edits are done in order.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable

import attrs
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from uma_trio.kv.cache import KvCache, Placement
from uma_trio.kv.checkpoints import APART, BEFORE_END, EACH
from uma_trio.kv.edits import Copy, Edit, Forget, Mark, Remove
from uma_trio.kv.pool import IDLE_SHARE
from uma_trio.kv.prefix import WORTH_SHARING

BACKGROUND, NORMAL = 2, 1


def tokens(*parts: int | Iterable[int]) -> np.ndarray:
    """Parts behind one another; a number is a text of fifty tokens of its own."""
    found: list[int] = []
    for part in parts:
        found.extend(range(100 * part, 100 * part + 50) if isinstance(part, int) else part)
    return np.asarray(found, dtype=np.int32)


def cache(**options: object) -> KvCache:
    given = {"n_sequences": 8, "n_cells": 8000, "cells_per_sequence": 8000} | options
    return KvCache(**given)  # type: ignore[arg-type]


def done(books: KvCache, prompt: np.ndarray, answer: int | Iterable[int] = (), **who: object) -> np.ndarray:
    """A request that ran to its end and left what it held, which is returned."""
    held = tokens(prompt, answer)
    placement = books.place(prompt, len(held) + 1, **who)  # type: ignore[arg-type]
    assert placement is not None
    books.use(placement.seq_id, len(held))
    books.end(placement.seq_id, held)
    books.take_edits()
    return held


SYSTEM, HELLO, ANSWER, MORE, OTHER = range(1, 6)
LONG = np.arange(3000, 3800, dtype=np.int32)


# -- reservation ----------------------------------------------------------------------------------------


def test_a_sequence_comes_only_with_all_its_room() -> None:
    books = KvCache(n_sequences=2, n_cells=100, cells_per_sequence=60)
    assert books.place(tokens([1]), 60) == Placement(0, 0)
    assert books.place(tokens([2]), 41) is None
    assert books.place(tokens([2]), 40) == Placement(1, 0)
    books.end(0)
    assert books.place(tokens([2]), 60) == Placement(0, 0)
    assert books.take_edits() == (Remove(0),)


@pytest.mark.parametrize("cells", [0, -1, 61])
def test_what_can_never_be_is_told_apart_from_what_must_wait(cells: int) -> None:
    with pytest.raises(ValueError, match="1 to 60"):
        KvCache(n_sequences=2, n_cells=100, cells_per_sequence=60).place(tokens([1]), cells)


def test_more_than_reserved_is_a_defect() -> None:
    books = cache()
    books.place(tokens([1]), 10)
    books.use(0, 10)
    with pytest.raises(AssertionError, match="11 of 10"):
        books.use(0, 11)


def test_a_sequence_that_nobody_holds() -> None:
    for call in (lambda: cache().use(0, 1), lambda: cache().rewind(0, 1), lambda: cache().end(1)):
        with pytest.raises(KeyError):
            call()


def test_check_integrity_sees_a_leak() -> None:
    books = cache()
    books.place(tokens([1]), 10)
    books._pool.reserved += 1
    with pytest.raises(AssertionError):
        books.check_integrity()


# -- one after another: what ended stays, and is gone on with -------------------------------------------


def test_a_chats_next_turn_goes_on_in_place() -> None:
    books = cache()
    first = done(books, tokens(SYSTEM, HELLO), ANSWER)
    assert books.statistics().cached_cells == len(first)
    assert books.place(tokens(first, MORE), 300) == Placement(0, held=len(first))
    assert books.take_edits() == ()
    assert books.statistics().cached_sequences == 0


def test_an_answer_asked_for_again_needs_one_token_computed_for_its_logits() -> None:
    books = cache()
    prompt = tokens(SYSTEM, HELLO)
    done(books, prompt, ANSWER)
    assert books.place(prompt, 200) == Placement(0, held=len(prompt) - 1)
    assert books.take_edits() == (Remove(0, len(prompt) - 1),)


def test_a_turn_that_was_rewritten_loses_only_what_stood_behind() -> None:
    books = cache()
    done(books, tokens(SYSTEM, HELLO), ANSWER)
    assert books.place(tokens(SYSTEM, HELLO, OTHER), 200) == Placement(0, held=100)
    assert books.take_edits() == (Remove(0, 100),)


def test_a_shared_system_prompt_leaves_the_longer_conversation_alone() -> None:
    """It is copied, where to go on in place would lose more than it shares."""
    books = cache()
    long = done(books, tokens(SYSTEM, HELLO), tokens(ANSWER, MORE))
    assert books.place(tokens(SYSTEM, OTHER), 150) == Placement(1, held=50)
    assert books.take_edits() == (Copy(0, 1, 50),)
    assert books.place(tokens(long, OTHER), 300) == Placement(0, held=len(long))


def test_without_room_beside_it_the_longer_conversation_goes_after_all() -> None:
    books = cache(n_sequences=1)
    done(books, tokens(SYSTEM, HELLO), tokens(ANSWER, MORE))
    assert books.place(tokens(SYSTEM, OTHER), 150) == Placement(0, held=50)
    assert books.take_edits() == (Remove(0, 50),)


def test_a_short_common_beginning_is_computed_again() -> None:
    books = cache()
    done(books, tokens([7] * (WORTH_SHARING - 1), HELLO))
    assert books.place(tokens([7] * (WORTH_SHARING - 1), OTHER), 100) == Placement(1, held=0)
    done(books, tokens([8] * WORTH_SHARING, HELLO))
    assert books.place(tokens([8] * WORTH_SHARING, OTHER), 100) == Placement(3, held=WORTH_SHARING)


def test_the_longest_common_beginning_is_taken() -> None:
    books = cache()
    for part in (MORE, OTHER):
        placement = books.place(tokens(SYSTEM, HELLO, part), 150)
        assert placement is not None
        books.use(placement.seq_id, 150)
    books.end(0, tokens(SYSTEM, HELLO, MORE))
    books.end(1, tokens(SYSTEM, HELLO, OTHER))
    books.take_edits()
    assert books.place(tokens(SYSTEM, HELLO, OTHER, ANSWER), 200) == Placement(1, held=150)


def test_tenants_share_nothing() -> None:
    books = cache()
    held = done(books, tokens(SYSTEM, HELLO), ANSWER, tenant=1)
    assert books.place(held, 200, tenant=2) == Placement(1, held=0)
    assert books.place(held, 200, tenant=1) == Placement(0, held=len(held) - 1)


def test_who_wants_nothing_cached_neither_takes_nor_leaves_anything() -> None:
    books = cache()
    held = done(books, tokens(SYSTEM, HELLO))
    assert books.place(held, 200, private=True) == Placement(1, held=0)
    books.use(1, len(held))
    assert books.place(tokens(held, MORE), 200) == Placement(0, held=len(held))
    books.end(1, held)
    assert books.statistics().cached_sequences == 0
    assert books.take_edits() == (Remove(1),)


def test_reuse_switched_off() -> None:
    books = cache(reuse=False)
    held = done(books, tokens(SYSTEM, HELLO))
    assert books.held() == {}
    books.place(held, 200)
    books.use(0, 100)
    assert books.place(held, 200) == Placement(1, held=0)


def test_a_memory_that_cannot_forget_goes_on_with_whole_sequences_or_not_at_all() -> None:
    books = cache(rewinds=False)
    held = done(books, tokens(SYSTEM, HELLO), ANSWER)
    assert books.place(tokens(SYSTEM, HELLO, OTHER), 200) == Placement(1, held=0)
    assert books.place(held, 200) == Placement(2, held=0), "its last token would have to be removed"
    assert books.place(tokens(held, MORE), 300) == Placement(0, held=len(held))
    assert books.take_edits() == ()


def asked(books: KvCache, prompt: np.ndarray, answer: int | Iterable[int] = ()) -> tuple[int, tuple[Edit, ...]]:
    """A request that ran to its end, pausing where it is to: what was held of its prompt, and all edits."""
    held = tokens(prompt, answer)
    placement = books.place(prompt, len(held) + 1)
    assert placement is not None
    edits: list[Edit] = []
    while length := books.pause(placement.seq_id):
        edits += books.take_edits()
        books.use(placement.seq_id, length)
    edits += books.take_edits()
    books.use(placement.seq_id, len(held))
    edits += books.take_edits()
    books.end(placement.seq_id, held)
    return placement.held, (*edits, *books.take_edits())


def test_a_memory_that_cannot_forget_goes_back_to_a_checkpoint() -> None:
    """Those before the end of a prompt, and where a turn began."""
    books = cache(rewinds=False, checkpoints=20)
    first = tokens(SYSTEM, HELLO)
    held = tokens(first, ANSWER)
    assert asked(books, first, ANSWER) == (0, (Mark(0, 1),))
    assert asked(books, first, ANSWER) == (100 - BEFORE_END, (Remove(0, 92, 1),)), "the answer is asked for again"
    second = tokens(held, LONG[:100])
    answer = tokens(ANSWER, range(20))
    assert asked(books, second, answer) == (150, (Mark(0, 2),)), "the turn before ended shortly behind the last one"
    assert asked(books, tokens(second, answer, OTHER), 9) == (320, (Mark(0, 3),)), "where a turn begins"
    assert asked(books, tokens(second, answer, MORE), 9) == (320, (Remove(0, 320, 3),)), "the last turn was rewritten"
    assert asked(books, tokens(second, MORE), 9) == (242, (Remove(0, 242, 2), Forget(3))), (
        "what was thought was left out"
    )
    books.check_integrity()


def test_a_branch_has_its_sources_checkpoints() -> None:
    books = cache(rewinds=False, checkpoints=20)
    first = tokens(SYSTEM, HELLO)
    asked(books, first, LONG)
    assert asked(books, tokens(first, OTHER), 9) == (92, (Copy(0, 1, 92, 1),))
    books.saving.forget(tokens(first, LONG), tenant=0, needed=lambda _: False)
    assert books.take_edits() == (Remove(0),), "the branch needs it still"
    books.saving.forget(tokens(first, OTHER, 9), tenant=0, needed=lambda _: False)
    assert books.take_edits() == (Remove(1), Forget(1))


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_there_are_never_more_checkpoints_than_they_may_be(most: int) -> None:
    """Of a sequence the first and the latest stay, and the longest idle one gives."""
    books = cache(rewinds=False, checkpoints=most)
    story = tokens(SYSTEM, HELLO)
    for turn in range(2 * EACH):
        asked(books, story, range(APART))
        story = tokens(story, range(APART), [turn])
        books.check_integrity()
    points = [point.length for point in books._pool.entries[0].points]
    assert len(points) == min(most, EACH)
    if most > 1:
        assert points[0] == 92
    assert points[-1] == len(story) - (APART + 1) - 1, "where the last turn began"
    asked(books, LONG[:400], [1, 2, 3])
    books.check_integrity()
    assert [len(entry.points) for entry in books._pool.entries.values()] == [min(most, EACH) - (most <= EACH), 1]


def placed(books: KvCache, prompt: np.ndarray, **who: object) -> Placement:
    """A request that has just come."""
    placement = books.place(prompt, len(prompt), **who)  # type: ignore[arg-type]
    assert placement is not None
    return placement


def pauses(books: KvCache, seq_id: int) -> list[int]:
    """Where reading pauses, of a request that is read from now to its end."""
    found = []
    while length := books.pause(seq_id):
        found.append(length)
        books.use(seq_id, length)
    return found


def uncuttable(**options: object) -> KvCache:
    return cache(**{"rewinds": False, "checkpoints": 64} | options)


def test_inside_a_long_prompt_there_are_some_checkpoints_more_and_more_towards_its_end() -> None:
    for length, inside in ((519, []), (520, [256]), (1200, [576, 832]), (6000, [2944, 4416, 5184])):
        books = uncuttable()
        placed(books, np.arange(length, dtype=np.int32))
        assert pauses(books, 0) == [*inside, length - BEFORE_END]
        books.check_integrity()


def test_inside_is_what_is_read_and_not_what_was_there_before() -> None:
    books = uncuttable(n_cells=20_000, cells_per_sequence=20_000)
    story = np.arange(3000, dtype=np.int32)
    done(books, story)
    assert placed(books, tokens(story, range(1000))).held == 3000
    assert pauses(books, 0) == [3456, 3712, 3992]


def test_a_conversation_that_is_saved_goes_on_at_its_end() -> None:
    books = uncuttable()
    placed(books, np.arange(6000, dtype=np.int32), durable=True)
    assert pauses(books, 0) == [6000 - BEFORE_END]


def test_nobody_loses_a_checkpoint_to_one_that_may_be_of_no_use() -> None:
    books = uncuttable(checkpoints=3)
    asked(books, LONG[:400])
    placed(books, np.arange(6000, dtype=np.int32))
    assert pauses(books, 1) == [6000 - BEFORE_END]
    assert len(books._pool.entries[0].points) == 1


def test_where_a_second_prompt_goes_another_way_the_third_one_begins() -> None:
    """Found out by the second, as the first could not know it."""
    books = uncuttable()
    system = LONG[:600]
    held = [asked(books, tokens(system, tail), 9)[0] for tail in (HELLO, ANSWER, MORE, OTHER)]
    assert held == [0, 320, 600, 600]


@pytest.mark.parametrize("unified", [True, False])
def test_who_is_waited_for_pauses_where_the_others_go_another_way(unified: bool) -> None:
    books = uncuttable(unified=unified, cells_per_sequence=8000 if unified else 1000)
    prompts = [tokens(LONG, part) for part in range(50, 58)]
    computed, _ = together(books, prompts)
    assert computed == len(LONG) + 8 * 50


def test_who_asks_the_same_waits_for_the_last_checkpoint() -> None:
    computed, _ = together(uncuttable(), [LONG] * 8)
    assert computed == len(LONG) + 7 * BEFORE_END


def test_what_is_shared_with_several_that_are_read_is_waited_for_in_turn() -> None:
    """They go different ways, one after the other: each part is computed once."""
    books = uncuttable(n_cells=20_000, cells_per_sequence=20_000)
    ways = [tokens(LONG[:length], range(length, length + 70)) for length in (800, 640, 480, 200)]
    computed, _ = together(books, ways)
    assert computed == len(LONG) + 4 * 70


def test_who_comes_when_that_place_is_passed_goes_back_and_pauses_there_for_others() -> None:
    books = uncuttable()
    prompts = [tokens(LONG, part) for part in (50, 51, 52)]
    placed(books, prompts[0])
    assert books.pause(0) == 384
    books.use(0, 384)
    books.use(0, len(LONG) + 10)
    assert placed(books, prompts[1]) == Placement(1, held=384)
    assert books.pause(1) == len(LONG)
    assert placed(books, prompts[2]).waits
    books.use(1, len(LONG))
    assert books.followed() == [(2, len(LONG))]


def test_nobody_has_to_pause_at_every_turn() -> None:
    """Who comes then gets what there is a pause for anyway."""
    books = cache(rewinds=False, checkpoints=1000, n_sequences=64, n_cells=200_000, cells_per_sequence=200_000)
    story = np.arange(5000, dtype=np.int32)
    placed(books, story)
    for n in range(40):
        placed(books, tokens(story[: 5000 - 100 * n], [7, 7, 7]))
    assert len(books._pool.entries[0].pauses) == EACH
    assert len(pauses(books, 0)) <= EACH
    while books.followed():
        books.take_edits()
    books.check_integrity()


def test_a_lower_class_is_not_waited_for_at_a_pause() -> None:
    books = uncuttable()
    placed(books, tokens(LONG, 50), rank=BACKGROUND)
    assert not placed(books, tokens(LONG, 51), rank=NORMAL).waits
    assert placed(books, tokens(LONG, 52), rank=BACKGROUND).waits


def test_of_what_such_a_memory_holds_only_the_whole_is_kept() -> None:
    books = cache(rewinds=False)
    books.place(tokens(SYSTEM), 100)
    books.use(0, 60)
    books.end(0, tokens(SYSTEM))
    assert books.statistics().cached_sequences == 0
    assert books.take_edits() == (Remove(0),)


def test_wrong_guesses_leave_the_cache() -> None:
    books = cache()
    books.place(tokens(SYSTEM), 200)
    books.use(0, 60)
    books.rewind(0, 53)
    assert books.held() == {0: 53}
    books.use(0, 58)
    books.end(0, tokens(SYSTEM, [1] * 5))
    assert books.take_edits() == (Remove(0, 53), Remove(0, 55))
    assert books.statistics().cached_cells == 55


# -- room -----------------------------------------------------------------------------------------------


def test_the_longest_idle_goes_first_and_only_when_room_is_needed() -> None:
    books = cache(n_sequences=4, n_cells=1000, cells_per_sequence=1000, unified=False)
    for part in (SYSTEM, HELLO, ANSWER):
        done(books, tokens(part))
    assert books.place(tokens(MORE), 800) == Placement(3, held=0), "850 cells are free"
    assert list(books.held()) == [0, 1, 2]
    books.end(3)
    books.place(tokens(HELLO, MORE), 150)  # goes on with 1, and is the latest when it ends
    books.use(1, 100)
    books.end(1, tokens(HELLO, MORE))
    books.take_edits()
    books.place(tokens(OTHER), 850)
    assert books.take_edits() == (Remove(0),)
    assert list(books.held()) == [1, 2]


def test_nobody_is_evicted_in_vain() -> None:
    books = cache(n_sequences=3, n_cells=300, cells_per_sequence=300, unified=False)
    done(books, tokens(SYSTEM))
    books.place(tokens(OTHER), 200)
    assert books.place(tokens(HELLO), 101) is None
    assert books.take_edits() == ()
    assert books.place(tokens(HELLO), 100) is not None
    assert books.take_edits() == (Remove(0),)


def test_who_is_gone_on_with_is_not_evicted_for_it() -> None:
    books = cache(n_sequences=8, n_cells=300, cells_per_sequence=300, unified=False)
    held = done(books, tokens(SYSTEM, HELLO))
    done(books, tokens(OTHER))
    assert books.place(tokens(held, MORE), 300) == Placement(0, held=100)
    assert books.take_edits() == (Remove(1),)


def test_a_unified_cache_keeps_a_share_of_its_cells_idle_at_most() -> None:
    """Attention passes over all of them for every token of everybody; while nobody is served, of nobody."""
    books = cache(n_sequences=64)
    for part in range(1, 60):
        done(books, tokens(part))
    assert books.statistics().cached_cells == 59 * 50
    books.place(tokens(70), 51)
    books.take_edits()
    assert books.statistics().cached_cells == IDLE_SHARE * 8000
    last = [books.place(tokens(part, [1]), 51) for part in (19, 20)]
    assert [placement and placement.held for placement in last] == [0, 50], "the longest idle went"


def test_apart_sequences_are_in_nobodys_way() -> None:
    books = cache(n_sequences=64, cells_per_sequence=125, unified=False)
    for part in range(1, 60):
        done(books, tokens(part))
    assert books.statistics().cached_cells == 59 * 50


def test_what_is_larger_than_that_share_goes_alone() -> None:
    books = cache()
    done(books, tokens(SYSTEM))
    done(books, tokens(range(2001)))
    assert books.held() == {0: 50, 1: 2001}
    books.place(tokens(70), 51)
    assert books.take_edits() == (Remove(1),)
    assert books.held() == {0: 50}


# -- together: what is being read is waited for ---------------------------------------------------------


def together(books: KvCache, prompts: Iterable[np.ndarray], chunk: int = 100) -> tuple[int, int]:
    """Requests that arrive at once, read chunk by chunk: tokens that were computed, and steps."""
    held: dict[int, int] = {}
    waiting, sizes = {}, {}
    for prompt in prompts:
        placement = books.place(prompt, len(prompt))
        assert placement is not None
        (waiting if placement.waits else held)[placement.seq_id] = placement.held
        sizes[placement.seq_id] = len(prompt)
    computed = steps = 0
    while waiting or any(held[seq_id] < sizes[seq_id] for seq_id in held):
        for seq_id, n in books.followed():
            del waiting[seq_id]
            held[seq_id] = n
        books.take_edits()
        for seq_id in held:
            n = min(chunk, (books.pause(seq_id) or sizes[seq_id]) - held[seq_id])
            held[seq_id] += n
            books.use(seq_id, held[seq_id])
            computed += n
        steps += 1
    books.check_integrity()
    return computed, steps


def test_eight_that_arrive_together_compute_what_they_share_once() -> None:
    prompts = [tokens(LONG, [i + 1]) for i in range(8)]
    assert together(cache(), prompts) == (800 + 8, 9)


def test_eight_that_are_the_same_compute_it_once_but_for_the_last_token() -> None:
    assert together(cache(), [LONG] * 8) == (800 + 7, 9)


def test_where_copying_takes_time_one_a_step_is_copied() -> None:
    prompts = [tokens(LONG, [i + 1]) for i in range(8)]
    apart = {"cells_per_sequence": 1000, "unified": False}
    assert together(cache(**apart), prompts) == (800 + 8, 8 + 7)


def test_who_comes_while_the_first_is_half_read_waits_for_that_one() -> None:
    """And not for one that waits itself."""
    books = cache()
    for i in range(3):
        assert books.place(tokens(LONG, [i + 1]), 900) == Placement(i, held=0, waits=i > 0)
        books.use(0, 100 * (i + 1))
    books.use(0, 800)
    assert books.followed() == [(1, 800), (2, 800)]


def test_who_comes_when_it_is_read_waits_for_nobody() -> None:
    books = cache()
    for i in range(3):
        books.place(tokens(LONG, [i + 1]), 900)
    books.use(0, 850)
    assert books.place(tokens(LONG, [9]), 900) == Placement(3, held=800)
    assert books.take_edits() == (Copy(0, 3, 800),)


def test_those_that_wait_elect_one_when_the_first_is_cancelled() -> None:
    books = cache()
    for i in range(8):
        books.place(tokens(LONG, [i + 1]), 900)
    books.use(0, 300)
    books.end(0)
    assert books.followed() == [(1, 0)]
    books.use(1, 801)
    assert books.followed() == [(i, 800) for i in range(2, 8)], "in one step, not one after another"


def test_one_that_stalls_gives_what_it_has_and_another_goes_on() -> None:
    books = cache()
    for i in range(3):
        books.place(tokens(LONG, [i + 1]), 900)
    books.use(0, 300)
    assert books.followed() == []
    assert books.followed(stalled=[0]) == [(1, 300)]
    assert books.take_edits() == (Copy(0, 1, 300),)
    books.use(1, 801)
    assert books.followed(stalled=[0]) == [(2, 800)]


def test_one_that_stalls_at_its_beginning_is_left() -> None:
    books = cache()
    for i in range(3):
        books.place(tokens(LONG, [i + 1]), 900)
    assert books.followed(stalled=[0]) == [(1, 0)]
    books.use(1, 801)
    assert books.followed(stalled=[0]) == [(2, 800)]


def test_one_that_ends_with_its_first_token_is_copied_before_it_goes() -> None:
    """Although it is more than idle sequences may hold in all."""
    books = cache(n_cells=1700, cells_per_sequence=1700)
    for i in range(2):
        books.place(tokens(LONG, [i + 1]), 801)
    books.use(0, 801)
    books.end(0, tokens(LONG, [1]))
    assert books.followed() == [(1, 800)]
    assert books.take_edits() == (Copy(0, 1, 800), Remove(0))


def test_a_lower_class_is_not_waited_for() -> None:
    books = cache()
    books.place(LONG, 900, rank=BACKGROUND)
    books.use(0, 300)
    assert books.place(tokens(LONG, [1]), 900, rank=NORMAL) == Placement(1, held=300)
    assert books.place(tokens(LONG, [2]), 900, rank=BACKGROUND).waits  # type: ignore[union-attr]


def test_when_the_engines_cache_is_lost_requests_stay_and_hold_nothing() -> None:
    """Whether it is empty or nobody knows what is left in it."""
    for lost, edits in ((True, ()), (False, tuple(map(Remove, range(5))))):
        books = cache(n_sequences=5)
        done(books, tokens(OTHER))
        books.place(LONG, 900)
        books.use(1, 500)
        assert books.place(LONG, 900) == Placement(2, held=0, waits=True)
        assert books.place(tokens(LONG[:500], [1]), 900) == Placement(3, held=500)
        books.clear(lost=lost)
        assert books.take_edits() == edits
        assert books.held() == {}
        assert books.statistics().cells_reserved == 2700
        books.use(1, 800)
        assert books.followed() == [(2, 799)]


# -- whatever happens -----------------------------------------------------------------------------------


@attrs.define
class Request:
    name: int
    story: list[int]
    """Its prompt, and what it will generate."""
    n_prompt: int
    tenant: int
    rank: int
    private: bool
    cells: int
    waits: bool
    held: int


@attrs.frozen
class Cell:
    """One token in the engine, and who computed it."""

    token: int
    name: int
    tenant: int
    private: bool


Sequences = dict[int, list[Cell]]


@attrs.define
class Plain:
    """The plainest engine."""

    most: int | None
    """Checkpoints; ``None``: it can be cut without."""
    sequences: Sequences = attrs.field(factory=dict)
    marks: Sequences = attrs.field(factory=dict)
    """What a sequence held, by number of the checkpoint."""

    def after(self, edits: Iterable[Edit]) -> Plain:
        """It as it is when ``edits`` are done, each of which must be possible."""
        there = Plain(self.most, {seq_id: list(cells) for seq_id, cells in self.sequences.items()}, dict(self.marks))
        for edit in edits:
            there.do(edit)
        return there

    def do(self, edit: Edit) -> None:
        if isinstance(edit, Copy):
            assert not self.sequences.get(edit.target)
            assert 0 < edit.length <= len(self.sequences[edit.source])
            self.sequences[edit.target] = list(self.sequences[edit.source])
            self.cut(edit.target, edit.length, edit.mark)
        elif isinstance(edit, Remove):
            self.cut(edit.seq_id, edit.start, edit.mark)
        elif isinstance(edit, Mark):
            assert edit.mark not in self.marks
            assert self.most is not None
            assert len(self.marks) < self.most
            self.marks[edit.mark] = list(self.sequences[edit.seq_id])
        elif isinstance(edit, Forget):
            self.marks.pop(edit.mark, None)

    def cut(self, seq_id: int, length: int, mark: int | None) -> None:
        cells = self.sequences.setdefault(seq_id, [])
        if self.most is not None and 0 < length < len(cells):
            assert mark is not None
            assert [cell.token for cell in self.marks[mark]] == [cell.token for cell in cells[:length]]
        else:
            assert mark is None
        del cells[length:]


seqs = st.sets(st.integers(0, 7), max_size=2)


class Bookkeeping(RuleBasedStateMachine):
    """The books beside the plainest engine."""

    @initialize(
        n=st.sampled_from([8, 5, 3, 2, 1]),
        cells=st.sampled_from([600, 1200, 200, 100]),
        unified=st.booleans(),
        rewinds=st.sampled_from([True, True, False]),
        reuse=st.sampled_from([True] * 5 + [False]),
        checkpoints=st.sampled_from([64, 3, 0]),
    )
    def start(self, n: int, cells: int, unified: bool, rewinds: bool, reuse: bool, checkpoints: int) -> None:
        self.whole_only = not rewinds and not checkpoints
        self.n, self.unified, self.rewinds, self.reuse = n, unified, rewinds, reuse
        self.most = cells
        self.n_cells = cells if unified else n * cells
        self.books = KvCache(
            n_sequences=n,
            n_cells=self.n_cells,
            cells_per_sequence=cells,
            unified=unified,
            rewinds=rewinds,
            checkpoints=checkpoints,
            reuse=reuse,
        )
        self.engine = Plain(None if rewinds else checkpoints)
        self.requests: dict[int, Request] = {}
        self.told: list[list[int]] = []
        """Stories of requests so far: others begin like them."""
        self.names = iter(range(1 << 30))

    # -- rules

    @rule(
        n=st.sampled_from([1, 2, 8]),
        like=st.integers(0, 5),
        same=st.sampled_from([1.0, 0.9, 0.5, 0.0]),
        n_new=st.sampled_from([20, 1, 60]),
        answer=st.sampled_from([10, 1, 40]),
        variant=st.integers(0, 1),
        tenant=st.sampled_from([0, 0, 0, 1]),
        rank=st.sampled_from([1, 1, 0, 2]),
        private=st.sampled_from([False] * 7 + [True]),
    )
    def arrive(
        self,
        n: int,
        like: int,
        same: float,
        n_new: int,
        answer: int,
        variant: int,
        tenant: int,
        rank: int,
        private: bool,
    ) -> None:
        """Some that begin like an earlier one, and each other."""
        old = self.told[-like - 1 :][0] if self.told else []
        begin = [*old[: int(same * len(old))], *range(variant, variant + n_new)]
        for i in range(n):
            prompt = [*begin, i] if n > 1 else begin
            self.ask(prompt, [*prompt, *range(100 + variant, 100 + variant + answer)], tenant, rank, private)

    def ask(self, prompt: list[int], story: list[int], tenant: int, rank: int, private: bool) -> None:
        cells = len(story) - 1
        array = np.asarray(prompt, dtype=np.int32)
        if cells > self.most:
            with pytest.raises(ValueError, match=str(cells)):
                self.books.place(array, cells)
            return
        idle = {seq_id: len(held) for seq_id, held in self.idle().items()}
        best = self.longest_idle(prompt, tenant) if self.rewinds else self.furthest_idle(prompt, tenant)
        before, edits = self.books.held(), list(self.books._pool.edits)
        placement = self.books.place(array, cells, tenant=tenant, rank=rank, private=private)
        free_cells = self.n_cells - sum(request.cells for request in self.requests.values())
        assert (placement is not None) == (cells <= free_cells and len(self.requests) < self.n)
        if placement is None:
            assert (self.books.held(), self.books._pool.edits) == (before, edits), "somebody was evicted in vain"
            return
        self.check_evicted(idle, self.books._pool.edits[len(edits) :], placement.seq_id, cells, free_cells)
        assert placement.held < len(prompt)
        assert not (placement.waits and placement.held)
        if self.whole_only:
            assert not placement.waits
            assert placement.held in (0, idle.get(placement.seq_id))
        if best >= WORTH_SHARING and not private:
            assert placement.held >= best or placement.waits
        if private or not self.reuse:
            assert (placement.held, placement.waits) == (0, False)
        self.told.append(story)
        self.requests[placement.seq_id] = Request(
            next(self.names), story, len(prompt), tenant, rank, private, cells, placement.waits, placement.held
        )

    def longest_idle(self, prompt: list[int], tenant: int) -> int:
        """What an idle sequence of the same tenant could spare a request, at most."""
        found = [0]
        for seq_id, held in self.idle().items():
            if self.books._pool.entries[seq_id].tenant == tenant:
                same = [a == b for a, b in zip(prompt[:-1], held, strict=False)]
                found.append(([*same, False]).index(False))
        return max(found)

    def furthest_idle(self, prompt: list[int], tenant: int) -> int:
        """The same where a sequence goes on whole or from a checkpoint."""
        found = [0]
        for seq_id, held in self.idle().items():
            entry = self.books._pool.entries[seq_id]
            if entry.tenant == tenant:
                lengths = [len(held), *(point.length for point in entry.points)]
                found += [n for n in lengths if n < len(prompt) and prompt[:n] == held[:n]]
        return max(found)

    def check_evicted(
        self, idle: dict[int, int], new: Iterable[Edit], seq_id: int, cells: int, free_cells: int
    ) -> None:
        """As many as needed and no more; the longest idle first, but for one that is copied from."""
        evicted = [edit.seq_id for edit in new if isinstance(edit, Remove) and not edit.start]
        if not evicted:
            return
        taken = 0 if seq_id in evicted else idle.get(seq_id, 0)
        free_ids = self.n - len(self.requests) - len(idle)
        for n in (len(evicted) - 1, len(evicted)):
            room = free_cells - sum(idle.values()) + taken + sum(idle[other] for other in evicted[:n]) >= cells
            assert (room and (bool(taken) or free_ids + n > 0)) == (n == len(evicted))
        if self.books._pool.unified or len(self.requests) <= 2:  # else those beside busy ones
            longer = list(idle)[: list(idle).index(evicted[-1])]
            assert len(set(longer) - set(evicted)) <= 1

    @rule(most=st.sampled_from([400, 30, 5, 1]), slow=seqs, stalled=seqs)
    def step(self, most: int, slow: set[int], stalled: set[int]) -> None:
        """As the runner: who need not wait any longer, the edits, and some tokens each."""
        stalled = stalled & set(self.requests)
        names = {request.name for seq_id, request in self.requests.items() if seq_id not in stalled | slow}
        self.begin_step(stalled, names)
        for seq_id, request in self.requests.items():
            if not request.waits and request.name in names:
                self.feed(seq_id, most)

    def begin_step(self, stalled: Collection[int], names: Collection[int]) -> None:
        """Up to the edits, of a step that feeds the requests of ``names`` that need not wait."""
        ready = dict(self.books.followed(stalled))
        for seq_id, held in ready.items():
            request = self.requests[seq_id]
            assert request.waits
            request.waits, request.held = False, held
            assert held < request.n_prompt
        self.settle(names)
        edits = self.books.take_edits()
        if not self.unified:
            assert sum(isinstance(edit, Copy) for edit in edits) <= 1
        elif self.requests:
            assert self.books.statistics().cached_cells <= IDLE_SHARE * self.n_cells
        if self.whole_only:
            assert all(edit == Remove(edit.seq_id) for edit in edits)
        self.engine = self.engine.after(edits)
        self.check_waiting(stalled, ready, edits)

    def settle(self, names: Collection[int]) -> None:
        """Who begins may be moved, and is the same."""
        for seq_id, request in list(self.requests.items()):
            if request.name in names and not request.waits and not request.held:
                moved = self.books.settle(seq_id)
                assert moved == seq_id or not self.unified
                del self.requests[seq_id]
                assert moved not in self.requests
                self.requests[moved] = request

    def check_waiting(self, stalled: Collection[int], ready: Collection[int], edits: Collection[Edit]) -> None:
        """Each for one that will come to hold what is waited for, or for its turn to be copied."""
        for seq_id, request in self.requests.items():
            if not request.waits:
                continue
            leader = self.books._pool.entries[seq_id].leader
            assert leader is not None
            if not self.unified and (leader.idle or any(isinstance(edit, Copy) for edit in edits)):
                continue  # for its turn; or it has just made room, and the next step finds that out
            assert self.books._pool.entries[leader.seq_id] is leader, "waits for one that is gone"
            other = self.requests[leader.seq_id]
            assert other.rank <= request.rank
            assert leader.seq_id not in stalled
            assert other.held < self.books._pool.entries[seq_id].until or leader.seq_id in ready
            met = set()
            while leader is not None:
                assert leader.seq_id not in met, "they wait for each other"
                met.add(leader.seq_id)
                leader = leader.leader

    def feed(self, seq_id: int, most: int) -> None:
        request = self.requests[seq_id]
        n = min(most, (self.books.pause(seq_id) or request.cells) - request.held)
        fed = request.story[request.held : request.held + n]
        cells = [Cell(token, request.name, request.tenant, request.private) for token in fed]
        held = self.engine.sequences.setdefault(seq_id, [])
        assert len(held) == request.held
        held += cells
        request.held += n
        if n:
            self.books.use(seq_id, request.held)

    @rule(which=st.integers(0, 7), lost=st.sampled_from([0, 0, 0, 5]))
    def finish(self, which: int, lost: int) -> None:
        """What is kept may be less than what it held: guesses, and what stood behind a stop string."""
        able = [seq_id for seq_id, request in self.requests.items() if request.held == request.cells]
        able = able or [seq_id for seq_id, request in self.requests.items() if not request.waits]
        if able:
            seq_id = able[which % len(able)]
            request = self.requests.pop(seq_id)
            n = max(0, request.held - lost)
            self.books.end(seq_id, np.asarray(request.story[:n], dtype=np.int32))

    @rule(which=st.integers(0, 7))
    def cancel(self, which: int) -> None:
        if self.requests:
            seq_id = list(self.requests)[which % len(self.requests)]
            self.books.end(seq_id)
            del self.requests[seq_id]

    @rule(which=st.integers(0, 7), n=st.integers(1, 8))
    def guess_wrong(self, which: int, n: int) -> None:
        able = [seq_id for seq_id, request in self.requests.items() if request.held > request.n_prompt]
        if able and self.rewinds:
            seq_id = able[which % len(able)]
            request = self.requests[seq_id]
            request.held = max(request.n_prompt, request.held - n)
            self.books.rewind(seq_id, request.held)

    @precondition(lambda self: self.requests)
    @rule(lost=st.booleans())
    def fail(self, lost: bool) -> None:
        """Everybody begins again.  Where the cache is not lost it may hold anything."""
        self.books.clear(lost=lost)
        for cells in self.engine.sequences.values():
            del cells[0 if lost else len(cells) // 2 :]
        if lost:
            self.engine.marks.clear()
        for request in self.requests.values():
            request.held = 0

    # -- what holds

    def idle(self) -> dict[int, list[int]]:
        return {seq_id: entry.tokens.tolist() for seq_id, entry in self.books._pool.idle.items()}

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "books"):
            return
        self.books.check_integrity()
        kv, idle = self.books.statistics(), self.idle()
        assert kv.sequences == len(self.requests)
        assert kv.cells_reserved == sum(request.cells for request in self.requests.values())
        assert kv.cells_used == sum(request.held for request in self.requests.values())
        assert (kv.cached_sequences, kv.cached_cells) == (len(idle), sum(map(len, idle.values())))
        assert kv.cells_reserved + kv.cached_cells <= kv.cells == self.n_cells
        assert not set(idle) & set(self.requests)

    @invariant()
    def holds_what_it_says(self) -> None:
        if not hasattr(self, "books"):
            return
        there = self.engine.after(self.books._pool.edits)
        engine = {seq_id: cells for seq_id, cells in there.sequences.items() if cells}
        assert set(there.marks) == {point.mark for entry in self.books._pool.entries.values() for point in entry.points}
        for seq_id, entry in self.books._pool.entries.items():
            for point in entry.points:
                told = [cell.token for cell in there.marks[point.mark]]
                assert told == [cell.token for cell in engine[seq_id][: point.length]]
        assert {seq_id: len(cells) for seq_id, cells in engine.items()} == self.books.held()
        assert sum(map(len, engine.values())) <= self.n_cells
        for seq_id, request in self.requests.items():
            cells = engine.get(seq_id, [])
            assert [cell.token for cell in cells] == request.story[: request.held]
            assert {cell.tenant for cell in cells} <= {request.tenant}, "tenants share"
            for cell in cells:
                assert cell.name == request.name or not (cell.private or request.private), "private ones share"
        for seq_id, idle in self.idle().items():
            assert [cell.token for cell in engine[seq_id]] == idle
            assert not any(cell.private for cell in engine[seq_id])

    def teardown(self) -> None:
        """Nobody waits for ever: if no client stalls, all are done after a few steps, and everything can be placed."""
        if not hasattr(self, "books"):
            return
        for _ in range(2 * self.n + 2 if self.rewinds else 4 * self.n + 4):  # one pauses on its way
            self.begin_step((), {request.name for request in self.requests.values()})
            for seq_id, request in self.requests.items():
                if not request.waits:
                    self.feed(seq_id, request.cells)
            self.holds_what_it_says()
        assert all(request.held == request.cells for request in self.requests.values())
        for seq_id in self.requests:
            self.books.end(seq_id)
        assert self.books.place(np.zeros(self.most, dtype=np.int32), self.most, private=True) is not None


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("checkpoints", [None, 0, 5, 100])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_long_life(n: int, unified: bool, checkpoints: int | None) -> None:
    """The same rules, as often as they come in a daemon's day; ``None``: of a memory that can be cut."""
    live(n, unified, checkpoints, random.Random(n))


def live(n: int, unified: bool, checkpoints: int | None, chance: random.Random) -> None:
    for cells in (100, 300, 600):
        house = Bookkeeping()
        rewinds = checkpoints is None
        house.start(n, cells * (n if unified else 1), unified, rewinds, reuse=True, checkpoints=checkpoints or 0)
        for _ in range(500):
            some = {chance.randrange(8) for _ in range(chance.choice([0, 0, 0, 1, 2]))}
            match chance.choices(["arrive", "step", "finish", "cancel", "guess", "fail"], [25, 50, 20, 4, 10, 0.3])[0]:
                case "arrive":
                    house.arrive(
                        n=chance.choice([1, 1, 2, n]),
                        like=chance.randrange(6),
                        same=chance.choice([1.0, 0.9, 0.5, 0.0]),
                        n_new=chance.choice([1, 20, 60]),
                        answer=chance.choice([1, 10, 40]),
                        variant=chance.randrange(2),
                        tenant=chance.choice([0, 0, 0, 1]),
                        rank=chance.choice([0, 1, 1, 2]),
                        private=chance.random() < 0.1,
                    )
                case "step":
                    house.step(
                        chance.choice([400, 30, 5, 1]), some, {seq_id for seq_id in some if chance.random() < 0.5}
                    )
                case "finish":
                    house.finish(chance.randrange(8), chance.choice([0, 0, 5]))
                case "cancel":
                    house.cancel(chance.randrange(8))
                case "guess":
                    house.guess_wrong(chance.randrange(8), chance.randint(1, 8))
                case "fail":
                    house.fail(chance.random() < 0.5)
            house.adds_up()
            house.holds_what_it_says()
        house.teardown()


# -- side by side -----------------------------------------------------------------------------------


def busy(books: KvCache, n: int, cells: int = 100) -> list[int]:
    """``n`` requests that have begun."""
    ids = []
    for _ in range(n):
        placement = books.place(np.arange(20, dtype=np.int32), cells, private=True)
        assert placement is not None
        ids.append(books.settle(placement.seq_id))
        books.use(ids[-1], 20)
    return ids


def test_who_begins_takes_the_place_beside_busy_ones() -> None:
    books = KvCache(n_sequences=8, n_cells=800, cells_per_sequence=100, unified=False)
    ids = busy(books, 5)
    assert ids == [0, 1, 2, 3, 4]
    waiting = books.place(np.arange(20, dtype=np.int32), 100, private=True)
    assert waiting is not None
    assert waiting.seq_id == 5
    books.end(2)
    assert books.settle(5) == 2, "what has become free between others is taken"
    assert books.settle(2) == 2
    books.use(2, 20)
    assert books.settle(2) == 2, "who holds something stays"
    books.check_integrity()


@pytest.mark.parametrize("n_busy", [1, 3])
def test_beside_several_streams_an_idle_sequence_makes_room(n_busy: int) -> None:
    """Two streams apart cost little; more of them cost more than what one conversation has computed."""
    books = KvCache(n_sequences=8, n_cells=800, cells_per_sequence=100, unified=False)
    ids = busy(books, n_busy + 1)
    kept = books.place(np.arange(100, 150, dtype=np.int32), 100)
    assert kept is not None
    books.end(ids[1])
    books.use(books.settle(kept.seq_id), 50)
    seq_id = next(seq for seq, held in books.held().items() if held == 50)
    assert seq_id == 1
    books.end(1, np.arange(100, 150, dtype=np.int32))
    coming = books.place(np.arange(20, dtype=np.int32), 100, private=True)
    assert coming is not None
    assert (books.settle(coming.seq_id) == 1) == (n_busy == 3)
    assert (books.statistics().cached_sequences == 0) == (n_busy == 3)
    books.check_integrity()


def test_in_a_shared_pool_it_does_not_matter() -> None:
    books = KvCache(n_sequences=8, n_cells=800, cells_per_sequence=800)
    busy(books, 5)
    placement = books.place(np.arange(20, dtype=np.int32), 100, private=True)
    assert placement is not None
    books.end(2)
    assert books.settle(placement.seq_id) == placement.seq_id
