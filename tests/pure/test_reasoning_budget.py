"""A budget of reasoning: what it counts, when the end follows, and how many tokens may be sampled before that."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from uma_trio.daemon.text.budget import ReasoningLimit
from uma_trio.models.markers import ReasoningMarkers

END = ["</", "think>"]
THINK = ReasoningMarkers(begin=("<think>",), end=("</think>",))
AGAIN = ReasoningMarkers(begin=("<think>",), end=("</think>",), repeats=True)
CONTROLS = ReasoningMarkers(begin=("\ud800x",), end=("</think>",), repeats=True, controls={7: "\ud800"})


class Answer:
    """An answer of tokens that are text; each text gets an id, and ``#`` is the control token 7."""

    def __init__(self, n_tokens: int, markers: ReasoningMarkers = THINK) -> None:
        self._bytes = {7: b""}
        end = [self._id(text.encode()) for text in END]
        self._budget = ReasoningLimit(n_tokens=n_tokens, end=end, markers=markers).budget("", None)
        self.tokens: list[int] = []

    def _id(self, data: bytes) -> int:
        token = 7 if data == b"#" else 100 + len(self._bytes)
        self._bytes.setdefault(token, data)
        return token

    @property
    def n_free(self) -> float:
        return self._budget.n_free

    def feed(self, *parts: str | bytes) -> bool:
        """Whether the end follows after ``parts``."""
        tokens = [self._id(part if isinstance(part, bytes) else part.encode()) for part in parts]
        return bool(self._budget.end_after(tokens, self._bytes.__getitem__))


def test_the_markers_do_not_count() -> None:
    answer = Answer(2)
    assert answer.n_free == 3
    assert not answer.feed("<thi", "nk>")
    assert answer.n_free == 2
    assert not answer.feed("a")
    assert answer.feed("b")
    assert answer.n_free == math.inf
    assert not answer.feed("c", "<think>", "d", "e", "f")


def test_a_budget_of_0_ends_it_at_once() -> None:
    assert Answer(0).feed("<think>")
    assert not Answer(0).feed("Hello")


def test_it_is_not_ended_inside_a_character_nor_inside_its_own_end() -> None:
    answer = Answer(1)
    assert not answer.feed("<think>", "é".encode()[:1])
    assert answer.n_free == 1
    assert answer.feed("é".encode()[1:])
    answer = Answer(1)
    assert not answer.feed("<think>", "</thi")
    assert not answer.feed("nk>")
    answer = Answer(1)
    assert not answer.feed("<think>", "</thi")
    assert answer.feed("s>")


def test_a_delay_has_a_bound() -> None:
    answer = Answer(1)
    assert not answer.feed("<think>", b"\xc3")
    assert any(answer.feed(b"\xc3") for _ in range(10))


def test_a_later_stretch_has_what_the_earlier_ones_left() -> None:
    answer = Answer(3, AGAIN)
    assert not answer.feed("<think>", "a", "b", "</think>", "c")
    assert answer.n_free == 2
    assert not answer.feed("<think>")
    assert answer.feed("d")
    assert answer.n_free == 1, "the next token may be a marker"
    assert answer.feed("<think>")


def test_a_marker_of_several_tokens_cannot_come_with_the_next_one() -> None:
    answer = Answer(0, CONTROLS)
    assert answer.n_free == 2
    assert not answer.feed("Hello ")
    assert answer.n_free == 2
    assert not answer.feed("#")
    assert answer.n_free == 1
    assert answer.feed("x")


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "a ", "#", "x"]), max_size=40), st.integers(0, 4))
def test_the_end_never_follows_before_the_room_is_used_up(parts: list[str], n_tokens: int) -> None:
    for markers in (THINK, AGAIN, CONTROLS):
        answer = Answer(n_tokens, markers)
        rooms = [answer.n_free]
        for part in parts:
            if answer.feed(part):
                assert all(room <= n for n, room in zip(range(len(rooms), 0, -1), rooms, strict=True)), rooms
                rooms = []
            rooms.append(answer.n_free)
