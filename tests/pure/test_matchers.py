"""Matchers of an engine: a slow grammar delays no other sequence, and sequences that are gone take no memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest

from tests.support.fake_engine import fake_vocabulary
from uma_trio.engine import matchers as module
from uma_trio.engine.matchers import Matchers
from uma_trio.engine.slow_thread import SlowThread
from uma_trio.engine_link.grammar_state import GrammarState

N_VOCAB = len(fake_vocabulary().tokens)
DIGITS = '{"grammars": [{"lark_grammar": "start: /([1-4][0-9][0-9] )+/"}]}'


def state(key: str, *answer: int) -> GrammarState:
    return GrammarState(key, np.array(answer, np.int32))


@pytest.fixture
def matchers() -> Iterator[Matchers]:
    made = Matchers(fake_vocabulary, N_VOCAB, 2)
    made.define("digits", DIGITS)
    yield made
    made.close()


def masked(matchers: Matchers, seq_id: int, now: GrammarState, timeout_ms: float = 60_000) -> set[int] | None:
    """The tokens that are allowed; ``None`` if the mask is late."""
    logits = np.zeros((1, N_VOCAB), np.float32)
    filled = matchers.begin([(seq_id, 0, now, ())]).wait(timeout_ms)
    assert not filled.failures
    if filled.late:
        return None
    filled.masks[0].apply(logits[0])
    return set(np.flatnonzero(np.isfinite(logits[0])).tolist())


def test_a_busy_slow_thread_delays_no_sequence_that_was_fast(matchers: Matchers) -> None:
    assert 123 in (masked(matchers, 0, state("digits")) or set())
    release = threading.Event()
    assert matchers._slow is not None
    matchers._slow.submit(0.0, release.wait)
    matchers.define("other", DIGITS.replace("[1-4]", "[5-8]"))
    assert masked(matchers, 1, state("other"), timeout_ms=1) is None, "it is compiled by the slow thread"
    assert 456 in (masked(matchers, 0, state("digits", 123)) or set())
    assert 456 in (masked(matchers, 2, state("digits", 123)) or set()), "a new sequence with a grammar that is known"
    release.set()
    matchers._sequences[1].work.future.result()
    assert 567 in (masked(matchers, 1, state("other")) or set())


def test_a_sequence_whose_mask_took_long_goes_to_the_slow_thread_and_comes_back(
    matchers: Matchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked(matchers, 0, state("digits"))
    monkeypatch.setattr(module, "SLOW_S", -1.0)
    masked(matchers, 0, state("digits", 123))
    assert matchers._sequences[0].is_slow
    monkeypatch.setattr(module, "SLOW_S", 1000.0)
    assert 456 in (masked(matchers, 0, state("digits", 123, 124)) or set())
    assert not matchers._sequences[0].is_slow


def test_a_sequence_that_fails_fails_alone(matchers: Matchers) -> None:
    logits = np.zeros((3, N_VOCAB), np.float32)
    wanted = [(0, 0, state("digits"), ()), (1, 1, state("digits", 1), ()), (2, 2, state("digits", 123), ())]
    filled = matchers.begin(wanted).wait(60_000)
    assert list(filled.failures) == [1], "its token does not follow the grammar"
    assert not filled.late
    for row, mask in filled.masks.items():
        mask.apply(logits[row])
    assert np.isfinite(logits[0]).any()
    assert not np.isfinite(logits[1]).any()
    assert np.isfinite(logits[2]).any()


def test_matchers_of_sequences_that_are_gone_are_dropped(matchers: Matchers) -> None:
    for seq_id in range(100):
        masked(matchers, seq_id, state("digits"))
    assert len(matchers._sequences) <= module.MAX_IDLE + 1
    assert 456 in (masked(matchers, 0, state("digits", 123)) or set()), "one that comes back gets a new matcher"


def test_a_new_sequence_goes_before_those_that_have_used_much_time(
    matchers: Matchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_S", -1.0)  # all are slow
    for seq_id in range(5):
        masked(matchers, seq_id, state("digits"))
    release = threading.Event()
    assert matchers._slow is not None
    matchers._slow.submit(0.0, release.wait)
    order: list[int] = []
    for seq_id in range(5):
        masked(matchers, seq_id, state("digits", 123), timeout_ms=0)
    matchers.define("other", DIGITS.replace("[1-4]", "[5-8]"))
    masked(matchers, 5, state("other"), timeout_ms=0)
    for seq_id, sequence in matchers._sequences.items():
        assert sequence.work is not None
        assert sequence.work.future is not None
        sequence.work.future.add_done_callback(functools.partial(_note, order, seq_id))
    release.set()
    matchers._slow.submit(float("inf"), lambda: None).result()  # after all others
    assert order[0] == 5
    assert sorted(order[1:]) == [0, 1, 2, 3, 4]


def _note(order: list[int], seq_id: int, _: object) -> None:
    order.append(seq_id)


def test_work_that_waits_is_cancelled_when_the_thread_is_closed() -> None:
    slow = SlowThread("test")
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait()

    running = slow.submit(0.0, work)
    waiting = slow.submit(1.0, lambda: None)
    begun.wait()
    slow.close()
    release.set()
    running.result()
    with pytest.raises(CancelledError):
        waiting.result()
