"""The scorecard: recordings and counters in, verdicts out."""

from __future__ import annotations

import pytest

from uma_trio.demo.recording import Answer, Question, Stream, Track, arrivals, possible_switches, reading_windows, switches, within
from uma_trio.demo.scorecard import Counters, score


def track(name: str, times: list[float], *, sent: float = 0.0, interactive: bool = True, text: str = "x", reason: str = "length") -> Track:
    question = Question(text="?")
    answer = Answer(question=question, sent_s=sent, token_s=times, pieces=[text] * len(times), reason=reason)
    return Track(stream=Stream(name=name, questions=(question,), interactive=interactive), answers=[answer])


def counted(*, calls: int = 10, rows: float = 30.0) -> Counters:
    return Counters(batch_calls=calls, batch_rows=rows, tokens=30, prompt_tokens=5)


def judged(tracks: list[Track], *, alone: list[Track] | None = None, counters: Counters | None = None) -> dict[str, bool]:
    card = score(tracks, alone or tracks, counters or counted(), wall_s=2.0, max_gap_ms=150)
    assert card.go == all(check.passed for check in card.checks)
    return {check.name: check.passed for check in card.checks}


def steps(start: float, n: int, gap: float) -> list[float]:
    return [start + i * gap for i in range(n)]


GOOD = [
    track("chat", steps(0.10, 30, 0.1)),
    track("other", steps(0.15, 30, 0.1)),
    track("document", steps(2.0, 10, 0.1), interactive=False),
]


def test_a_good_run_is_go():
    assert all(judged(GOOD).values())


def test_figures_of_a_stream():
    (stream,) = score([track("a", [1.0, 1.1, 1.3], sent=0.5)], [track("a", [1.0, 1.1, 1.3])], counted(), wall_s=3.0, max_gap_ms=1).streams
    assert stream.ttft_ms == pytest.approx(500)
    assert stream.itl_p50_ms == pytest.approx(150)
    assert stream.itl_max_ms == pytest.approx(200)
    assert stream.tokens == 3


def test_one_after_another_is_no_interleaving():
    tracks = [track("a", steps(0, 30, 0.1)), track("b", steps(10, 30, 0.1)), GOOD[2]]
    assert not judged(tracks)["tokens interleaved"]


def test_a_gap_while_the_document_is_read_is_a_freeze_and_one_after_it_is_not():
    frozen = track("chat", [0.1, 0.2, 0.9, *steps(1.0, 20, 0.1)])
    assert not judged([frozen, *GOOD[1:]])["no chat froze"]
    later = track("chat", [*steps(0.1, 25, 0.1), 2.9, 3.9])
    assert judged([later, *GOOD[1:]])["no chat froze"]


def test_no_chat_beside_the_document_proves_nothing():
    assert not judged([track("chat", steps(5, 10, 0.1)), GOOD[2]])["no chat froze"]


def test_small_batches_other_texts_and_missing_ends_are_no_go():
    assert not judged(GOOD, counters=counted(rows=12))["average batch"]
    assert not judged(GOOD, counters=counted(calls=0, rows=0))["average batch"]
    other = [track("chat", steps(0.1, 30, 0.1), text="y"), *GOOD[1:]]
    assert not judged(GOOD, alone=other)["same text as alone"]
    cut = [track("chat", steps(0.1, 30, 0.1), reason="cancelled"), *GOOD[1:]]
    assert not judged(cut)["all streams finished"]


def test_switches():
    order = arrivals([track("a", [1, 3, 5]), track("b", [2, 4])])
    assert order == [0, 1, 0, 1, 0]
    assert switches(order) == possible_switches(order) == 4
    assert possible_switches([0, 0, 0, 0, 1]) == 2
    assert switches([]) == possible_switches([]) == 0


def test_windows_are_of_long_prompts_and_take_what_overlaps():
    windows = reading_windows(GOOD)
    assert windows == [(0.0, 2.0)]
    assert within([(1.9, 2.1), (2.1, 2.2), (-1, 0), (-1, 3)], windows) == [(1.9, 2.1), (-1, 3)]
