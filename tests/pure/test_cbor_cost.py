"""What decoding a CBOR document costs: counted before it is decoded, however it is cut into parts."""

from __future__ import annotations

import itertools
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.errors import TooManyValues
from uma_trio.protocol.cbor_cost import CONTAINER, MAX_COST, NUMBER, TEXT, CborCost

documents = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    max_leaves=50,
)


def cost(*parts: bytes) -> int:
    counted = CborCost()
    for part in parts:
        counted.add(part)
    return counted._cost


def values(found: Any) -> int:
    """Values of a document as it was encoded, each with its weight."""
    match found:
        case str() | bytes():
            return TEXT
        case list():
            return CONTAINER + sum(map(values, found))
        case dict():
            return CONTAINER + sum(map(values, found)) + sum(map(values, found.values()))
    return NUMBER


@given(documents)
def test_each_value_counts_and_the_bytes_of_texts_do_not(document: Any) -> None:
    assert cost(cbor2.dumps(document)) == values(document)


def test_the_length_of_a_text_has_any_width() -> None:
    for length in (0, 23, 24, 255, 256, 65_535, 65_536):
        assert cost(cbor2.dumps([b"\x80" * length, "\x01" * length, []])) == 2 * TEXT + 2 * CONTAINER
    assert cost(b"\x82\x5b" + (3).to_bytes(8, "big") + b"\x80\x80\x80\x80") == TEXT + 2 * CONTAINER


@given(documents, st.lists(st.integers(0, 300)))
def test_it_does_not_matter_where_the_parts_are_cut(document: Any, cuts: list[int]) -> None:
    whole = cbor2.dumps([document, "x" * 300, document])
    places = sorted({0, len(whole), *[cut for cut in cuts if cut < len(whole)]})
    assert cost(*[whole[begin:end] for begin, end in itertools.pairwise(places)]) == cost(whole)


@all_cases(
    ("item", "weight"),
    [
        (b"\x80", CONTAINER),
        (b"\xa0", CONTAINER),
        (b"\x9f\xff", 2 * CONTAINER),
        (b"\x81" * 50 + b"\x01", 50 * CONTAINER + NUMBER),
        (b"\xe0", CONTAINER),
        (b"\xc0\x60", CONTAINER + TEXT),
        (b"\x01", NUMBER),
        (b"\xf9\x3c\x00", NUMBER),
        (b"\x61a", TEXT),
        (b"\x7f\x60\xff", 2 * TEXT + CONTAINER),
    ],
)
def test_too_many_values_are_refused(item: bytes, weight: int) -> None:
    most = MAX_COST // weight
    assert cost(item * most) <= MAX_COST
    with pytest.raises(TooManyValues, match="split the request, or send it as JSON"):
        cost(item * (most + 1))


@all_cases("beginning", [b"\x5b\xff", b"\x7b" + b"\xff" * 8, b"\x1b", b"\x9f", b"\xbf\xff", b"\x1c"])
def test_a_document_that_ends_in_the_middle_costs_something(beginning: bytes) -> None:
    assert cost(beginning) <= MAX_COST


def test_what_can_be_served_passes() -> None:
    for document in (
        {"prompt": [12345] * 131_072},
        {"prompt": "He said: [1, {2}], \"'\\\n" * 300_000},
        {"input": ["a text, of [a] batch"] * 2048},
        {"messages": [{"role": "user", "content": "x" * 1000}] * 1024},
    ):
        cost(cbor2.dumps(document))
