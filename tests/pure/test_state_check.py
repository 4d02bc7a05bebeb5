"""States that are verified while they are copied: which part llama.cpp may see before."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from tests.support.state_files import hashes_of
from uma_trio.engine.state_check import FRONT_PAGES, PAGES_PER_TASK, DamagedState, StateCheck, end_of_cells
from uma_trio.engine_link.state_pages import PAGE_BYTES


def state_of(
    n_cells: int, *, n_layers: int = 3, row: int = 8, n_streams: int = 1, stream: int = 0, transposed: bool = False
) -> bytes:
    """As llama.cpp writes the state of a sequence in one cache."""
    parts = [struct.pack("<IiI", 0x67677371, 0, n_streams), bytes(4 * stream), struct.pack("<I", n_cells)]
    parts += [struct.pack("<iIi", position, 1, 0) for position in range(n_cells)]
    parts += [struct.pack("<II", transposed, n_layers)]
    parts += [struct.pack("<iQ", 1, row) + b"k" * row * n_cells for _ in range(n_layers)]
    value = struct.pack("<iII", 1, 2, row // 2) if transposed else struct.pack("<iQ", 1, row)
    parts += [value + b"v" * row * n_cells for _ in range(n_layers)]
    return b"".join([*parts, bytes(4 * (n_streams - stream - 1))])


@all_cases("transposed", [False, True])
@all_cases(("n_streams", "stream"), [(1, 0), (5, 0), (5, 2), (256, 255)])
def test_the_cells_are_described_before_keys_and_values(transposed: bool, n_streams: int, stream: int) -> None:
    state = state_of(10, n_streams=n_streams, stream=stream, transposed=transposed)
    assert end_of_cells(memoryview(state)) == 12 + 4 * stream + 4 + 120 + 8


def test_states_of_other_memories_have_no_such_end() -> None:
    state = state_of(10)
    for other in (
        b"",
        state[:-1],
        state + b"\0",
        state + state[12:],  # a second cache behind the first
        state_of(10, n_streams=257),
        state.replace(struct.pack("<II", 0, 3), struct.pack("<II", 0, 0xFFFFFFFF)),
        struct.pack("<IiI", 1, 0, 2) + 2 * state[12:],
    ):
        assert end_of_cells(memoryview(other)) is None


@given(st.binary(max_size=400), st.integers(0, 500), st.integers(0, 400))
@example(struct.pack("<IIII", 0, 0, 0xFFFFFFFF, 0), 0, 0)
def test_no_bytes_break_the_search_for_that_end(noise: bytes, at: int, cut: int) -> None:
    state = state_of(5)
    for data in (noise, state[:at] + noise + state[at + len(noise) :], state[: len(state) - cut]):
        assert end_of_cells(memoryview(data)) in (None, *range(len(data) + 1))


N_PAGES = FRONT_PAGES + PAGES_PER_TASK + 2
LONG = state_of(40_000, row=40, n_layers=(N_PAGES * PAGE_BYTES) // (2 * 40 * 40_000))


@pytest.fixture(scope="module", params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with ThreadPoolExecutor(request.param) as executor:
        yield executor


def test_a_sound_state_is_verified(threads: Executor) -> None:
    assert end_of_cells(memoryview(LONG))
    with StateCheck(memoryview(LONG), hashes_of(LONG), threads) as check:
        check.begin(len(LONG))
        check.wait()


@all_cases("at", [0, 13, 300_000, FRONT_PAGES * PAGE_BYTES - 1])
def test_an_altered_front_is_found_before_the_copy(threads: Executor, at: int) -> None:
    data = bytearray(LONG)
    data[at] ^= 1
    with StateCheck(memoryview(data), hashes_of(LONG), threads) as check, pytest.raises(DamagedState):
        check.begin(len(data))


def test_altered_values_are_found_after_it(threads: Executor) -> None:
    data = bytearray(LONG)
    data[-1] ^= 1
    with StateCheck(memoryview(data), hashes_of(LONG), threads) as check:
        check.begin(len(data))
        with pytest.raises(DamagedState, match="altered between byte"):
            check.wait()


def test_what_stands_between_keys_and_values_is_found_before_the_copy(threads: Executor) -> None:
    """Where one of these sizes is wrong the state looks like one of another memory, which is verified first."""
    data = bytearray(LONG)
    end = end_of_cells(memoryview(LONG))
    assert end is not None
    per_layer = 12 + 40 * 40_000
    at = end + per_layer * (FRONT_PAGES * PAGE_BYTES // per_layer + 1) + 4
    assert at > FRONT_PAGES * PAGE_BYTES
    data[at] ^= 1
    with StateCheck(memoryview(data), hashes_of(LONG), threads) as check, pytest.raises(DamagedState):
        check.begin(len(data))


def test_states_of_other_memories_and_long_ones_are_verified_first(threads: Executor) -> None:
    nothing = bytes(len(LONG))
    cells = state_of(400_000, row=8, n_layers=2)
    assert (end_of_cells(memoryview(cells)) or 0) > FRONT_PAGES * PAGE_BYTES
    for state in (nothing, cells):
        data = bytearray(state)
        data[-1] ^= 1
        with StateCheck(memoryview(data), hashes_of(state), threads) as check, pytest.raises(DamagedState):
            check.begin(len(data))
