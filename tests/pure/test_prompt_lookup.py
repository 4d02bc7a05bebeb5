"""Prompt lookup: the draft is whatever followed the last occurrence of the last three tokens."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.daemon.serving.prompt_lookup import ACCEPTANCE_WEIGHT, NGRAM_SIZE, PromptLookup

token_lists = st.lists(st.integers(0, 2), max_size=60)
"""With a tiny vocabulary, so that n-grams repeat."""


@attrs.define
class Reference:
    """The same by a linear search after each token."""

    tokens: list[int]
    acceptance_rate: float
    position: int | None = attrs.field(init=False)
    """Where the draft begins."""

    def __attrs_post_init__(self) -> None:
        self.position = self.find()

    def find(self) -> int | None:
        """Return the position after the last earlier occurrence of the last three tokens."""
        t = self.tokens
        places = [n for n in range(NGRAM_SIZE, len(t)) if t[n - NGRAM_SIZE : n] == t[-NGRAM_SIZE:]]
        return places[-1] if places else None

    def append(self, token: int) -> None:
        """A match goes on for as long as its draft tokens are right."""
        accepted = self.position is not None and self.tokens[self.position] == token
        if self.position is not None:
            self.acceptance_rate += ACCEPTANCE_WEIGHT * (accepted - self.acceptance_rate)
        self.tokens.append(token)
        self.position = self.position + 1 if accepted and self.position is not None else self.find()


@given(token_lists, token_lists, st.integers(0, 20))
def test_drafts_match_the_reference(prompt: list[int], answer: list[int], n_draft: int) -> None:
    lookup, plain = PromptLookup(prompt), Reference(list(prompt), 0.5)
    for token in [*answer, None]:
        expected: list[int] = []
        for n in range(0 if plain.position is None else n_draft):  # draft tokens extend the sequence
            assert plain.position is not None
            expected.append([*plain.tokens, *expected][plain.position + n])
        assert list(lookup.draft(n_draft)) == expected
        assert lookup.acceptance_rate == plain.acceptance_rate
        if token is not None:
            lookup.append(token)
            plain.append(token)


@given(token_lists, token_lists)
def test_there_is_a_draft_if_the_last_three_tokens_occurred_before(prompt: list[int], answer: list[int]) -> None:
    lookup, tokens = PromptLookup(prompt), list(prompt)
    for token in [*answer, None]:
        earlier = [tuple(tokens[n : n + NGRAM_SIZE]) for n in range(len(tokens) - NGRAM_SIZE)]
        assert bool(lookup.draft(1)) == (tuple(tokens[-NGRAM_SIZE:]) in earlier)
        if token is not None:
            lookup.append(token)
            tokens.append(token)


@given(token_lists, token_lists)
def test_appending_tokens_is_like_a_longer_prompt(prompt: list[int], answer: list[int]) -> None:
    """The matches may differ, since a match goes on while it is right, but both have one or neither has."""
    whole, part = PromptLookup([*prompt, *answer]), PromptLookup(prompt)
    for token in answer:
        part.append(token)
    assert bool(whole.draft(1)) == bool(part.draft(1))


@given(token_lists, token_lists, st.integers(0, 70))
def test_a_draft_is_not_longer_than_requested(prompt: list[int], answer: list[int], n_draft: int) -> None:
    lookup = PromptLookup(prompt)
    for token in answer:
        draft = lookup.draft(n_draft)
        assert len(draft) <= n_draft
        assert list(draft) == list(lookup.draft(100))[:n_draft]
        lookup.append(token)


def is_drafted(lookup: PromptLookup, tokens: Sequence[int]) -> list[bool]:
    """Append ``tokens``, and return for each whether it was drafted."""
    found = []
    for token in tokens:
        found.append(list(lookup.draft(1)) == [token])
        lookup.append(token)
    return found


def test_an_answer_that_repeats_its_prompt_is_drafted_after_three_tokens() -> None:
    text = [10, 11, 12, 13, 14, 15, 16, 17]
    lookup = PromptLookup([*text, 1, 2])
    assert is_drafted(lookup, text) == [False] * 3 + [True] * 5
    assert list(lookup.draft(2)) == [1, 2]


def test_the_last_occurrence_counts() -> None:
    assert list(PromptLookup([1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3]).draft(2)) == [8, 9]


def test_a_changed_token_costs_one_rejection_and_three_tokens() -> None:
    record = [1, 2, 3, 4, 50, 5, 6, 7, 8, 9]
    changed = [1, 2, 3, 4, 51, 5, 6, 7, 8, 9]
    assert is_drafted(PromptLookup(record), changed) == [False] * 3 + [True, False, False, False, False, True, True]


@all_cases("n", range(NGRAM_SIZE + 1))
def test_a_short_sequence_has_no_draft(n: int) -> None:
    assert list(PromptLookup(range(n)).draft(5)) == []


def test_acceptance_rate_is_a_moving_average() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 1, 2, 3], acceptance_rate=0.5)
    lookup.append(4)
    assert lookup.acceptance_rate == 0.5 + ACCEPTANCE_WEIGHT * 0.5
    lookup.append(9)
    assert lookup.acceptance_rate == pytest.approx((1 - ACCEPTANCE_WEIGHT) * (0.5 + ACCEPTANCE_WEIGHT * 0.5))
    lookup.append(9)
    assert lookup.acceptance_rate == pytest.approx((1 - ACCEPTANCE_WEIGHT) * (0.5 + ACCEPTANCE_WEIGHT * 0.5)), (
        "there was no draft"
    )
    for _ in range(60):
        lookup.append(9)
    assert lookup.acceptance_rate > 0.99
