"""What decoding a JSON document costs: counted before it is decoded, however it is cut into parts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bench_scripts import bench_script
from tests.support.cases import all_cases
from uma_trio.errors import InvalidJson, TooManyValues
from uma_trio.protocol.json_cost import HARD_NUMBER, MAX_COST, MAX_DEPTH, SLICE_BYTES, TEXT_OR_CONTAINER, JsonCost

KIB = 1024
shapes = bench_script("body_shapes").SHAPES

documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('a,"\\[{1e5'),
    lambda each: st.lists(each) | st.dictionaries(st.text('a,"\\[{'), each),
    max_leaves=50,
)


def cost(*parts: bytes) -> int:
    counted = JsonCost()
    for part in parts:
        counted.add(part)
    return counted._cost


def check_cost(document: bytes) -> None:
    counted = JsonCost()
    for start in range(0, len(document), SLICE_BYTES):
        counted.add(document[start : start + SLICE_BYTES])


def values(found: Any) -> int:
    """Values of a document as the decoder returns it, each with its weight; a value is a comma, so the first is free."""
    match found:
        case str():
            return TEXT_OR_CONTAINER
        case list():
            return TEXT_OR_CONTAINER + max(0, len(found) - 1) + sum(map(values, found))
        case dict():
            return TEXT_OR_CONTAINER * (1 + len(found)) + max(0, len(found) - 1) + sum(map(values, found.values()))
        case float() if "e" in repr(found):
            return HARD_NUMBER
    return 0


@given(documents, st.booleans())
def test_texts_lists_objects_and_items_are_counted_outside_texts_only(document: Any, is_ascii: bool) -> None:
    text = json.dumps(document, ensure_ascii=is_ascii)
    long_numbers = cost(text.encode()) - values(document)
    assert long_numbers % HARD_NUMBER == 0
    assert long_numbers >= 0
    assert long_numbers == 0 or any(char.isdigit() for char in text)


@given(documents, st.lists(st.integers(0, 200)))
def test_it_does_not_matter_where_the_parts_are_cut(document: Any, cuts: list[int]) -> None:
    """Long numbers aside: one that is cut may count less."""
    whole = json.dumps(document).encode()
    places = sorted({0, len(whole), *[cut for cut in cuts if cut < len(whole)]})
    parts = [whole[begin:end] for begin, end in itertools.pairwise(places)]
    assert (cost(whole) - cost(*parts)) % HARD_NUMBER == 0


@all_cases("number", ["1e300", "5e-324", "0." + "0" * 37 + "1", "9" * 4000, "1E23"])
def test_numbers_that_take_microseconds_weigh_more(number: str) -> None:
    check_cost(json.dumps([number] * 1000).encode())
    with pytest.raises(TooManyValues, match="numbers with an exponent"):
        check_cost(b"[" + b",".join([number.encode()] * 1100) + b"]")


@all_cases(
    "document",
    [
        {"prompt": [12345] * 262_144},
        {"prompt": "He said: [1, {2}], \"'\\\n" * 300_000},
        {"input": ["a text, of [a] batch"] * 2048},
        {"input": [[12345] * 140] * 2048},
        {"messages": [{"role": "user", "content": '\\"' * 2000}] * 1024},
    ],
)
def test_what_can_be_served_passes(document: Any) -> None:
    check_cost(json.dumps(document).encode())


@all_cases(("begin", "end"), [(b"[", b"]"), (b'{"a[":', b"}")])
def test_nesting_is_bounded(begin: bytes, end: bytes) -> None:
    check_cost(b"[" + b",".join([begin * (MAX_DEPTH - 1) + b"1" + end * (MAX_DEPTH - 1)] * 9) + b"]")
    with pytest.raises(InvalidJson, match="nested too deeply"):
        check_cost(begin * (MAX_DEPTH + 1) + b"1" + end * (MAX_DEPTH + 1))


def work(decoded: Any) -> int:
    """How many values the decoder has made."""
    left, n = [decoded], 0
    while left:
        found = left.pop()
        n += 1
        if isinstance(found, dict):
            left += [*found, *found.values()]
        elif isinstance(found, list):
            n += len(found) - 1 if set(map(type, found)) == {int} else 0
            left += found[:1] if set(map(type, found)) == {int} else found
    return n


@all_cases("shape", shapes)
def test_each_shape_of_the_bench_is_refused_or_has_few_values(shape: Any) -> None:
    body = shape.body()
    try:
        check_cost(body)
    except TooManyValues:
        return
    if body:
        assert work(msgspec.json.decode(body)) <= MAX_COST
