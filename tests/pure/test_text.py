"""The text does not depend on where tokens end, and is emitted neither too early nor too late."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.steps import counted_steps
from uma_trio.daemon.text.assembler import TextAssembler


def split(data: bytes, positions: list[int]) -> list[bytes]:
    bounds = [0, *sorted(position % (len(data) + 1) for position in positions), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def run(parts, stop=()):
    assembler = TextAssembler(stop)
    emitted = [assembler.feed(0, part).text for part in parts]
    return [*emitted, assembler.finish().text], assembler.matched


def reference(text, stop):
    """Search after each character for a stop string that ends there, and prefer the longest."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


byte_strings = (
    st.binary(max_size=40)
    | st.text(max_size=20).map(str.encode)
    | st.lists(
        st.sampled_from(
            [b"\xf0\x9f\x98\x80", b"\xe2\x82", b"\xc3", b"a", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"]
        )
    ).map(b"".join)
)


@given(byte_strings, st.lists(st.integers(0, 1000)))
def test_any_split_decodes_like_the_whole(data, positions):
    texts, _ = run(split(data, positions))
    assert "".join(texts) == data.decode("utf-8", "replace")


@given(
    st.text(alphabet="ab é", max_size=30),
    st.lists(st.text(alphabet="ab é", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 1000)),
)
@example("abab", ["abc", "ba"], [1, 2, 3])
@example("aab", ["ab", "aab"], [1])
def test_stop_strings_at_any_split(text, stop, positions):
    texts, matched = run(split(text.encode(), positions), stop)
    assert ("".join(texts), matched) == reference(text, stop)


@given(st.text(alphabet="abc", max_size=30), st.text(alphabet="abc", min_size=1, max_size=5))
def test_nothing_is_held_back_longer_than_needed(text, stop):
    assembler = TextAssembler([stop])
    emitted = ""
    for n, character in enumerate(text, start=1):
        emitted += assembler.feed(0, character.encode()).text
        if assembler.matched:
            return
        held = text[len(emitted) : n]
        assert emitted + held == text[:n]
        assert stop.startswith(held)


def test_a_stop_string_over_several_tokens():
    texts, matched = run([b"one\n", b"\n", b"two"], ["\n\n"])
    assert texts == ["one", "", "", ""]
    assert matched == "\n\n"


def test_the_beginning_of_a_stop_string_is_emitted_if_the_rest_does_not_follow():
    texts, matched = run([b"END", b" of it"], ["END."])
    assert texts == ["", "END of it", ""]
    assert matched is None


def test_finish_emits_the_text_that_was_held_back():
    assembler = TextAssembler(["stop"])
    assert assembler.feed(0, b"sto").text == ""
    assert assembler.finish().text == "sto"


def test_a_character_in_two_tokens():
    assembler = TextAssembler()
    assert assembler.feed(0, b"\xe2\x82").text == ""
    assert assembler.feed(0, b"\xac!").text == "€!"


def test_an_incomplete_character_at_the_end():
    assembler = TextAssembler()
    assert assembler.feed(0, b"ok \xf0\x9f").text == "ok "
    assert assembler.finish().text == "�"


def test_nothing_is_emitted_after_a_match():
    assembler = TextAssembler(["."])
    assert assembler.feed(0, b"a.b").text == "a"
    assert assembler.matched == "."
    assert assembler.feed(0, b"c").text == ""
    assert assembler.finish().text == ""


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        TextAssembler([""])


def test_the_work_is_linear_in_the_worst_case():
    # Searching again after each token would take n x 2,000 steps here.
    n = 10_000
    assembler = TextAssembler(["a" * 2000 + "b"] + ["a" * length + "c" for length in range(1000, 1010)])
    with counted_steps() as steps:
        emitted = "".join(assembler.feed(0, b"a").text for _ in range(n)) + assembler.finish().text
    assert emitted == "a" * n
    assert steps.n < 40 * n
