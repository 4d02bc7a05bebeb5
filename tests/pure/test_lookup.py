"""Prompt lookup: guesses are what followed the last time that the same three tokens stood there."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.sampling.lookup import N_GRAM, WEIGHT, Lookup

stories = st.lists(st.integers(0, 2), max_size=60)
"""Of few words, so that they repeat themselves."""


@attrs.define
class Plainest:
    """The same by looking through everything each time."""

    tokens: list[int]
    hits: float
    at: int | None = attrs.field(init=False)
    """Where the guess stands."""

    def __attrs_post_init__(self) -> None:
        self.at = self.last_place()

    def last_place(self) -> int | None:
        """After the last earlier occurrence of the last three tokens."""
        t = self.tokens
        places = [n for n in range(N_GRAM, len(t)) if t[n - N_GRAM : n] == t[-N_GRAM:]]
        return places[-1] if places else None

    def follow(self, token: int) -> None:
        """A place whose guess came true is followed for as long as its guesses do."""
        true = self.at is not None and self.tokens[self.at] == token
        if self.at is not None:
            self.hits += WEIGHT * (true - self.hits)
        self.tokens.append(token)
        self.at = self.at + 1 if true and self.at is not None else self.last_place()


@given(stories, stories, st.integers(0, 20))
def test_it_is_what_the_plainest_search_finds(prompt: list[int], answer: list[int], most: int) -> None:
    lookup, plain = Lookup(prompt), Plainest(list(prompt), 0.5)
    for token in [*answer, None]:
        expected: list[int] = []
        for n in range(0 if plain.at is None else most):  # what is guessed is followed like what was told
            assert plain.at is not None
            expected.append([*plain.tokens, *expected][plain.at + n])
        assert list(lookup.guesses(most)) == expected
        assert lookup.hits == plain.hits
        if token is not None:
            lookup.follow(token)
            plain.follow(token)


@given(stories, stories)
def test_there_is_a_guess_where_the_last_three_tokens_stood_before(prompt: list[int], answer: list[int]) -> None:
    lookup, tokens = Lookup(prompt), list(prompt)
    for token in [*answer, None]:
        earlier = [tuple(tokens[n : n + N_GRAM]) for n in range(len(tokens) - N_GRAM)]
        assert bool(lookup.guesses(1)) == (tuple(tokens[-N_GRAM:]) in earlier)
        if token is not None:
            lookup.follow(token)
            tokens.append(token)


@given(stories, stories)
def test_a_prompt_in_parts_is_the_prompt(prompt: list[int], answer: list[int]) -> None:
    """Guesses may stand at another place, where one came true, but for the very next."""
    whole, part = Lookup([*prompt, *answer]), Lookup(prompt)
    for token in answer:
        part.follow(token)
    assert bool(whole.guesses(1)) == bool(part.guesses(1))


@given(stories, stories, st.integers(0, 70))
def test_guesses_are_never_more_than_asked_for(prompt: list[int], answer: list[int], most: int) -> None:
    lookup = Lookup(prompt)
    for token in answer:
        guesses = lookup.guesses(most)
        assert len(guesses) <= most
        assert list(guesses) == list(lookup.guesses(100))[:most]
        lookup.follow(token)


def told(lookup: Lookup, tokens: Sequence[int]) -> list[bool]:
    """Whether each of ``tokens`` was guessed."""
    found = []
    for token in tokens:
        found.append(list(lookup.guesses(1)) == [token])
        lookup.follow(token)
    return found


def test_an_answer_that_repeats_its_question_is_guessed_after_three_tokens() -> None:
    text = [10, 11, 12, 13, 14, 15, 16, 17]
    lookup = Lookup([*text, 1, 2])
    assert told(lookup, text) == [False] * 3 + [True] * 5
    assert list(lookup.guesses(2)) == [1, 2]


def test_of_several_places_the_last_one_counts() -> None:
    assert list(Lookup([1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3]).guesses(2)) == [8, 9]


def test_a_field_that_was_changed_costs_the_guess_and_three_tokens() -> None:
    record = [1, 2, 3, 4, 50, 5, 6, 7, 8, 9]
    changed = [1, 2, 3, 4, 51, 5, 6, 7, 8, 9]
    assert told(Lookup(record), changed) == [False] * 3 + [True, False, False, False, False, True, True]


@pytest.mark.parametrize("n", range(N_GRAM + 1))
def test_too_little_to_go_by(n: int) -> None:
    assert list(Lookup(range(n)).guesses(5)) == []


def test_hits_are_the_share_that_came_true_lately() -> None:
    lookup = Lookup([1, 2, 3, 4, 1, 2, 3], hits=0.5)
    lookup.follow(4)
    assert lookup.hits == 0.5 + WEIGHT * 0.5
    lookup.follow(9)
    assert lookup.hits == pytest.approx((1 - WEIGHT) * (0.5 + WEIGHT * 0.5))
    lookup.follow(9)
    assert lookup.hits == pytest.approx((1 - WEIGHT) * (0.5 + WEIGHT * 0.5)), "there was no guess"
    for _ in range(60):
        lookup.follow(9)
    assert lookup.hits > 0.99
