"""What the demo computes from token times: gaps, switches, the gate's verdicts; and how it looks."""

from __future__ import annotations

import io
import itertools

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.support.cases import all_cases
from uma_trio.demo import picture, script, view
from uma_trio.demo.recording import (
    Answer,
    Question,
    Stream,
    Track,
    arrivals,
    durations_ms,
    overlapping,
    percentile,
    possible_switches,
    prefill_windows,
    switches,
)
from uma_trio.demo.scorecard import Counters, CpuUse, score, score_stream

ASKED = Question(text="?")


def track(name, times, *, sent=0.0, interactive=True, reason="stop", texts=None, asked=ASKED):
    """A stream of one answer whose tokens came at ``times``."""
    answer = Answer(
        question=asked,
        sent_s=sent,
        token_s=list(times),
        texts=list(texts or ["x"] * len(times)),
        reason=reason,
        prompt_tokens=5,
        completion_tokens=len(times),
    )
    return Track(stream=Stream(name=name, questions=(asked,), interactive=interactive), answers=[answer])


def counted(ticks=10, rows=25.0, tokens=30, prompt_tokens=100):
    return Counters(ticks=ticks, batch_rows=rows, tokens=tokens, prompt_tokens=prompt_tokens)


def mixed():
    """Two chats and a document that is read from 1.0 to 1.5 while they go on."""
    return [
        track("chat 1", [0.9, 1.0, 1.1, 1.2, 1.5, 1.6]),
        track("chat 2", [0.91, 1.01, 1.11, 1.21, 1.51, 1.61]),
        track("document", [1.5001, 1.62], sent=1.0, interactive=False),
    ]


def judged(together, alone=None, counters=None, max_gap_ms=400.0, cpu=None):
    card = score(together, alone or together, counters or counted(), wall_s=2.0, max_gap_ms=max_gap_ms, cpu=cpu)
    return card, {check.name: check for check in card.checks}


# -- times ---------------------------------------------------------------------------------------


def test_ttft_counts_from_the_request_and_gaps_from_token_to_token():
    one = track("a", [1.5, 1.6, 1.8], sent=1.0)
    assert one.answers[0].ttft_ms == pytest.approx(500)
    assert durations_ms(one.gaps) == pytest.approx([100, 200])


def test_the_pause_between_two_answers_is_no_gap():
    one = track("a", [1.0, 1.1])
    one.answers += track("a", [5.0, 5.2], sent=4.9).answers
    assert durations_ms(one.gaps) == pytest.approx([100, 200])
    found = score_stream(one)
    assert (found.tokens, found.answers) == (4, 2)
    assert found.ttft_ms == pytest.approx(1000), "the worst of its answers"


def test_an_answer_without_tokens_has_no_figures():
    found = score_stream(track("a", []))
    assert (found.ttft_ms, found.itl_p50_ms, found.itl_max_ms) == (None, None, None)
    assert percentile([], 50) is None


def test_percentiles_lie_between_neighbours():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([1, 2, 3, 4], 100) == 4
    assert percentile([7], 99) == 7


def test_gaps_count_for_the_reading_that_they_overlap_in_part():
    gaps = [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert overlapping(gaps, [(1.5, 2.5)]) == [(1.0, 2.0), (2.0, 3.0)]
    assert overlapping(gaps, [(1.0, 2.0)]) == [(1.0, 2.0)], "touching is not overlapping"
    assert overlapping(gaps, []) == []


def test_only_long_prompts_are_read():
    assert prefill_windows(mixed()) == [(1.0, 1.5001)]


# -- interleaving --------------------------------------------------------------------------------


@all_cases(
    ("order", "count", "most"),
    [("", 0, 0), ("a", 0, 0), ("aaa", 0, 0), ("ab", 1, 1), ("aabb", 1, 3), ("abab", 3, 3), ("aaab", 1, 2), ("abcabc", 5, 5)],
)  # fmt: skip
def test_switches_and_the_most_there_can_be(order, count, most):
    indices = ["abc".index(letter) for letter in order]
    assert (switches(indices), possible_switches(indices)) == (count, most)


@given(st.lists(st.integers(0, 2), max_size=7))
def test_no_order_has_more_switches_than_are_possible(order):
    best = max((switches(other) for other in itertools.permutations(order)), default=0)
    assert best == possible_switches(order)


def test_arrivals_are_in_the_order_of_time():
    assert arrivals([track("a", [1.0, 3.0]), track("b", [2.0, 4.0])]) == [0, 1, 0, 1]


# -- the gate ------------------------------------------------------------------------------------


def test_everything_well_is_a_go():
    card, checks = judged(mixed())
    assert card.go
    assert all(check.passed for check in checks.values())
    assert card.tokens_per_s == pytest.approx(7)
    assert card.average_batch == pytest.approx(2.5)
    assert card.tokens_per_tick == pytest.approx(3.0)


def test_a_stream_cut_short_is_no_go():
    streams = mixed()
    streams[1].answers[0].reason = "cancelled"
    card, checks = judged(streams)
    assert not card.go
    assert not checks["all streams finished"].passed
    assert checks["all streams finished"].detail == "2 of 3"


def test_a_stream_with_a_question_unasked_has_not_finished():
    one = track("a", [1.0])
    one.stream = attrs.evolve(one.stream, questions=(ASKED, ASKED))
    assert not one.finished


def test_one_after_another_is_not_interleaved():
    streams = [track("a", [1, 2, 3, 4]), track("b", [5, 6, 7, 8]), track("c", [9, 10], interactive=False)]
    assert not judged(streams)[1]["tokens interleaved"].passed


@all_cases(("ticks", "rows", "passed"), [(10, 14.9, False), (10, 15.0, True), (0, 0.0, False)])
def test_the_average_batch_that_is_asked_for(ticks, rows, passed):
    assert judged(mixed(), counters=counted(ticks=ticks, rows=rows))[1]["average batch"].passed is passed


@all_cases(("allowed", "passed"), [(299.0, False), (301.0, True)])
def test_the_worst_gap_of_a_chat_while_the_document_is_read(allowed, passed):
    check = judged(mixed(), max_gap_ms=allowed)[1]["no chat froze"]
    assert check.passed is passed
    assert "worst gap 300.0 ms" in check.detail


@all_cases(
    ("by_others", "advice"),
    [
        (1.3, "Other programs used 1.3 of 2 cores during the run, which may be the reason."),
        (0.1, "Other programs used 0.1 of 2 cores during the run, so they are not the reason."),
        (None, "If other programs were busy, run the demo again"),
    ],
)
def test_late_tokens_come_with_the_load_of_the_machine(by_others, advice):
    cpu = None if by_others is None else CpuUse(cores=2, by_others=by_others)
    card, _ = judged(mixed(), max_gap_ms=299.0, cpu=cpu)
    assert card.advice.startswith(advice)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view.scorecard(card))
    assert f"NO-GO  {advice}" in console.export_text()


def test_load_is_no_excuse_for_a_wrong_text():
    alone = mixed()
    alone[1].answers[0].texts[3] = "y"
    card, _ = judged(mixed(), alone, cpu=CpuUse(cores=2, by_others=2.0))
    assert not card.go
    assert card.advice is None


def test_a_gap_outside_the_reading_does_not_count():
    streams = [track("chat", [0.0, 1.0, 1.1, 1.2, 3.0]), track("document", [1.15], sent=1.05, interactive=False)]
    assert "worst gap 100.0 ms, of 2" in judged(streams)[1]["no chat froze"].detail


def test_chats_that_were_silent_all_along_prove_nothing():
    streams = [track("chat", [0.0, 0.1]), track("document", [2.0], sent=1.0, interactive=False)]
    assert not judged(streams)[1]["no chat froze"].passed


def test_another_text_than_alone_is_named():
    alone = mixed()
    alone[1].answers[0].texts[3] = "y"
    check = judged(mixed(), alone)[1]["same text as alone"]
    assert not check.passed
    assert "chat 2" in check.detail
    assert "chat 1" not in check.detail


def test_texts_may_come_in_other_pieces():
    alone = mixed()
    alone[0].answers[0].texts = ["xx", "", "xx", "", "x", "x"]
    assert judged(mixed(), alone)[1]["same text as alone"].passed


def test_counters_are_differences_of_snapshots():
    before = Counters.of({"ticks_total": 0, "tokens_total": 0, "prompt_tokens_total": 0})
    after = {"ticks_total": 4, "avg_batch": 2.5, "tokens_total": 9, "prompt_tokens_total": 7}
    assert Counters.of(after).since(before) == counted(ticks=4, rows=10.0, tokens=9, prompt_tokens=7)
    assert before.average_batch is None
    assert before.tokens_per_tick is None


# -- what is asked, what is seen -----------------------------------------------------------------


def test_the_script_is_three_chats_and_a_long_document():
    streams = script.streams()
    assert streams == script.streams()
    assert [stream.interactive for stream in streams] == [True, True, True, False]
    chats = [len(question.text) for stream in streams[:3] for question in stream.questions]
    assert len(streams[3].questions[0].text) > 50 * max(chats)


def test_the_scene_shows_all_four_and_who_got_the_last_tokens():
    streams = script.streams()
    scene = view.Scene(streams)
    for stream in streams:
        seen = Track(stream=stream)
        seen.answers.append(Answer(question=stream.questions[0], sent_s=0.0))
        scene.request_sent(seen)
        for at in range(60):
            seen.answers[-1].token_s.append(1.0 + at)
            seen.answers[-1].texts.append(f"{stream.name[-1]}{at} ")
            scene.token_received(seen)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(scene.render(width=100, height=40))
    text = console.export_text()
    for stream in streams:
        assert f" {stream.name} " in text
        assert f"{stream.name[-1]}59" in text, "the newest words are in sight"
    assert "prefill took 1.0 s" in text
    assert text.count("█") == 100 - len("arrivals  ")


def test_long_questions_are_shown_by_their_end():
    assert view.shorten("Who are you?") == "Who are you?"
    assert view.shorten("word " * 1000 + "\n\nSummarise it.") == "[5,015 characters] Summarise it."


def test_the_picture_replays_the_run():
    tracks = [attrs.evolve(seen, stream=stream) for seen, stream in zip(mixed(), script.streams()[1:], strict=True)]
    card, _ = judged(tracks)
    counts = [picture.Count(1.05, counted(ticks=77), 3.0)]
    frames = list(picture._frames(tracks, counts, card))
    assert [round(frame.at_s, 6) for frame in frames] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.62]
    texts = ["".join(segment.text for line in frame.lines for segment in line) for frame in frames]
    blocks = [text.count("█") for text in texts]
    tokens = sorted(at for seen in tracks for at in seen.answers[0].token_s)
    assert blocks == [sum(at <= frame.at_s + 1e-9 for at in tokens) for frame in frames]
    assert ["77 ticks" in text for text in texts] == [False] * 6 + [True] * 4
    assert ["GO" in text for text in texts] == [False] * 9 + [True]


def test_a_long_run_has_no_more_frames():
    tracks = [track("chat 1", [float(at) for at in range(100)])]
    assert len(list(picture._frames(tracks, [], judged(mixed())[0]))) <= picture.MAX_FRAMES + 1


def test_the_picture_is_an_svg_without_anything_from_elsewhere():
    tracks = [attrs.evolve(seen, stream=stream) for seen, stream in zip(mixed(), script.streams(), strict=False)]
    card, _ = judged(tracks)
    drawn = picture.picture(tracks, [], card)
    assert drawn.startswith("<svg")
    assert ">NO-GO<" in drawn, "chat 2 has more questions"
    assert "url(" not in drawn
    assert "@import" not in drawn
    assert "<script" not in drawn
