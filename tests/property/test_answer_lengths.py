"""How many more tokens an answer is expected to have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.daemon.policy.answer_lengths import MAX_ANSWERS, AnswerLengths


def learned(*answers: tuple[int, bool]) -> AnswerLengths:
    found = AnswerLengths()
    for n_tokens, ended_itself in answers:
        found.record(n_tokens, ended_itself=ended_itself)
    return found


answers = st.lists(st.tuples(st.integers(0, 500), st.booleans()), max_size=100)


@given(answers, st.integers(0, 2000), st.integers(1, 2000))
def test_it_is_a_number_of_tokens_that_may_follow(answers: list[tuple[int, bool]], n: int, most: int) -> None:
    assert 1 <= learned(*answers).expected(n, most) <= most


@given(answers, st.integers(0, 500), st.integers(1, 500))
def test_more_are_expected_where_more_may_follow(answers: list[tuple[int, bool]], n: int, most: int) -> None:
    found = learned(*answers)
    assert found.expected(n, most) <= found.expected(n, most + 100) + 1e-9


def test_all_that_may_follow_until_an_answer_has_ended_by_itself() -> None:
    assert AnswerLengths().expected(10, 90) == 90
    assert learned((60, False), (100, False)).expected(10, 90) == 90


def test_the_mean_of_those_that_are_longer() -> None:
    found = learned((10, True), (20, True), (60, True))
    assert found.expected(0, 1000) == pytest.approx(30)
    assert found.expected(15, 1000) == pytest.approx((5 + 45) / 2)
    assert found.expected(0, 15) == pytest.approx((10 + 15 + 15) / 3), "those that are longer are cut"
    assert found.expected(80, 1000) == 80, "longer than all of them"


def test_an_answer_that_was_cut_counts_as_longer() -> None:
    assert learned((10, True), (10, False)).expected(0, 1000) == pytest.approx(10 + 10 / 2)


def test_old_answers_are_forgotten() -> None:
    assert learned(*[(400, True)] * 10, *[(8, True)] * MAX_ANSWERS).expected(0, 1000) == pytest.approx(8)
