"""Offsets: the bytes of a text that each token stands for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.tokenizer.alignment import Spelling, align


def raw(*spellings: str | bytes) -> list[Spelling]:
    return [Spelling(one.encode() if isinstance(one, str) else one) for one in spellings]


def special(text: str, *, left: bool = False, right: bool = False) -> Spelling:
    return Spelling(text.encode(), special=True, strips_left=left, strips_right=right)


@given(st.lists(st.binary(max_size=4)))
def test_consecutive_tokens(spellings: list[bytes]) -> None:
    ranges = align(b"".join(spellings), raw(*spellings), space_prefix=False)
    ends = [sum(map(len, spellings[: count + 1])) for count in range(len(spellings))]
    assert ranges == list(zip([0, *ends], ends, strict=False))


@given(st.binary(min_size=1), st.integers(0), st.integers(0, 255))
def test_a_text_that_differs_in_one_byte_has_no_offsets(text: bytes, index: int, byte: int) -> None:
    index %= len(text)
    other = text[:index] + bytes((byte,)) + text[index + 1 :]
    spellings = [text[at : at + 2] for at in range(0, len(text), 2)]
    assert (align(other, raw(*spellings), space_prefix=False) is None) == (other != text)


def test_a_split_character() -> None:
    assert align("é!".encode(), raw(b"\xc3", b"\xa9!"), space_prefix=False) == [(0, 1), (1, 3)]


@all_cases(
    ("text", "tokens", "expected"),
    [
        ("ab c", raw(" ab", " c"), [(0, 2), (2, 4)]),
        ("ab", raw(" ", "ab"), [(0, 0), (0, 2)]),
        (" ab", raw("  ", "ab"), [(0, 1), (1, 3)]),
        ("a<s>b", [*raw(" a"), special("<s>"), *raw(" b")], [(0, 1), (1, 4), (4, 5)]),
        ("<s><s>b", [special("<s>"), special("<s>"), *raw(" ", "b")], [(0, 3), (3, 6), (6, 6), (6, 7)]),
        ("a▁b c", raw(" a", " b", " c"), [(0, 1), (1, 5), (5, 7)]),
        ("", [], []),
    ],
)
def test_space_prefix_of_each_stretch_of_text(
    text: str, tokens: list[Spelling], expected: list[tuple[int, int]]
) -> None:
    assert align(text.encode(), tokens, space_prefix=True) == expected


def test_a_space_of_the_text_is_not_the_prefix() -> None:
    assert align(b" ab", raw(" ab"), space_prefix=True) is None
    assert align(b"ab", raw("ab"), space_prefix=True) is None


def test_whitespace_that_a_control_token_strips() -> None:
    tokens = [*raw("a"), special("<m>", left=True), special("<e>", right=True), *raw("b")]
    assert align(b"a \t<m><e>\n b", tokens, space_prefix=False) == [(0, 1), (3, 6), (6, 9), (11, 12)]
    assert align(b"a<m><e>b\n", tokens, space_prefix=False) is None
    assert align(b"<e> \n", [special("<e>", right=True)], space_prefix=False) == [(0, 3)]


@all_cases("tokens", [raw("ab"), raw("abcd"), raw("ABC"), raw("abc", "d"), [special("abd")], []])
def test_tokens_that_do_not_spell_the_text(tokens: list[Spelling]) -> None:
    assert align(b"abc", tokens, space_prefix=False) is None
