"""However the bytes come in pieces, the text is the same, and never too early."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from uma_trio.sampling import TextAssembler


def cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]


def run(pieces, stop=()):
    assembler = TextAssembler(stop)
    let_out = [assembler.feed(piece) for piece in pieces]
    return [*let_out, assembler.finish()], assembler.matched


def obvious(text, stop):
    """Letter by letter: the first end of a stop string, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


bytes_of_all_sorts = (
    st.binary(max_size=40)
    | st.text(max_size=20).map(str.encode)
    | st.lists(
        st.sampled_from(
            [b"\xf0\x9f\x98\x80", b"\xe2\x82", b"\xc3", b"a", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"]
        )
    ).map(b"".join)
)


@given(bytes_of_all_sorts, st.lists(st.integers(0, 1000)))
def test_any_split_decodes_as_the_whole_does(data, places):
    texts, _ = run(cut(data, places))
    assert "".join(texts) == data.decode("utf-8", "replace")


@given(
    st.text(alphabet="ab é", max_size=30),
    st.lists(st.text(alphabet="ab é", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 1000)),
)
@example("abab", ["abc", "ba"], [1, 2, 3])
@example("aab", ["ab", "aab"], [1])
def test_stop_strings_at_any_split(text, stop, places):
    texts, matched = run(cut(text.encode(), places), stop)
    assert ("".join(texts), matched) == obvious(text, stop)


@given(st.text(alphabet="abc", max_size=30), st.text(alphabet="abc", min_size=1, max_size=5))
def test_nothing_is_held_back_longer_than_needed(text, stop):
    assembler = TextAssembler([stop])
    let_out = ""
    for n, character in enumerate(text, start=1):
        let_out += assembler.feed(character.encode())
        if assembler.matched:
            return
        held = text[len(let_out) : n]
        assert let_out + held == text[:n]
        assert stop.startswith(held)


def test_a_stop_string_over_several_tokens():
    texts, matched = run([b"one\n", b"\n", b"two"], ["\n\n"])
    assert texts == ["one", "", "", ""]
    assert matched == "\n\n"


def test_what_only_looked_like_a_stop_string_is_let_out():
    texts, matched = run([b"END", b" of it"], ["END."])
    assert texts == ["", "END of it", ""]
    assert matched is None


def test_the_end_lets_out_what_was_held():
    assembler = TextAssembler(["stop"])
    assert assembler.feed(b"sto") == ""
    assert assembler.finish() == "sto"


def test_a_character_in_two_tokens():
    assembler = TextAssembler()
    assert assembler.feed(b"\xe2\x82") == ""
    assert assembler.feed(b"\xac!") == "€!"


def test_an_incomplete_character_at_the_end():
    assembler = TextAssembler()
    assert assembler.feed(b"ok \xf0\x9f") == "ok "
    assert assembler.finish() == "�"


def test_nothing_comes_after_a_match():
    assembler = TextAssembler(["."])
    assert assembler.feed(b"a.b") == "a"
    assert assembler.matched == "."
    assert assembler.feed(b"c") == ""
    assert assembler.finish() == ""


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        TextAssembler([""])


def test_time_is_linear_in_the_worst_case():
    # Searching anew at each token would take 40,000 x 2,000 steps here.
    assembler = TextAssembler(["a" * 2000 + "b"] + ["a" * n + "c" for n in range(1000, 1010)])
    started = time.perf_counter()
    let_out = "".join(assembler.feed(b"a") for _ in range(40_000)) + assembler.finish()
    assert let_out == "a" * 40_000
    assert time.perf_counter() - started < 2
