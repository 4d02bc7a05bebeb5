"""The engine contract of models whose memory cannot be truncated, as tests; fixtures as in ``engine_contract``."""

from __future__ import annotations

import pytest

from tests.support import engine_contract
from tests.support.engine_contract import alone, assert_refused, prefill_input, state_sizes, step
from uma_trio.engine_link.kv_ops import (
    CopyPrefix,
    DropCheckpoint,
    LoadState,
    MeasureState,
    SaveCheckpoint,
    SaveState,
    Truncate,
)
from uma_trio.engine_link.messages import EngineError, Step, StepInput

new_file = engine_contract.new_file  # a fixture


@pytest.fixture
def engine(make):
    return make(n_ctx=1024, n_seq_max=4, n_batch=64)


def checkpoint_bytes(engine, number):
    """Size of a checkpoint; 0 if it does not exist."""
    [(_, sizes)] = engine.step(Step([MeasureState(0, (number,))])).state_sizes
    return sizes[1]


def with_checkpoint(engine, prompts):
    """Prefill two prompts into sequence 0, with checkpoint 7 between them; returns the checkpoint's length."""
    engine.step(step(StepInput(0, 0, prompts[0], ())))
    engine.step(Step([SaveCheckpoint(0, 7)], [[StepInput(0, len(prompts[0]), prompts[1], ())]]))
    return len(prompts[0])


def test_truncating_without_the_right_checkpoint_fails(engine, prompts):
    at = with_checkpoint(engine, prompts)
    for wrong in (Truncate(0, at + 1), Truncate(0, at), Truncate(0, at, 8)):
        with pytest.raises(EngineError):
            engine.step(Step([wrong]))
        engine.reset()
        assert checkpoint_bytes(engine, 7) == 0, "a reset drops all checkpoints"
        with_checkpoint(engine, prompts)


def test_a_checkpoint_can_be_restored_many_times(engine, prompts):
    expected = [alone(engine, [*prompts[0], *more], 1) for more in prompts[1:]]
    at = with_checkpoint(engine, prompts)
    for more, answer in zip(prompts[1:], expected, strict=True):
        assert engine.step(Step([Truncate(0, at, 7)], [[prefill_input(0, more, at)]])).tokens == tuple(answer)
        assert engine.used_cells() == {0: at + len(more)}


def test_a_prefix_copied_at_a_checkpoint_goes_on_and_so_does_its_source(engine, prompts):
    copy = alone(engine, [*prompts[0], *prompts[2]], 1)
    source = alone(engine, [*prompts[0], *prompts[1], 5], 1)
    at = with_checkpoint(engine, prompts)
    inputs = [prefill_input(1, prompts[2], at), prefill_input(0, [5], at + len(prompts[1]))]
    assert engine.step(Step([CopyPrefix(0, 1, at, 7)], [inputs])).tokens == (*copy, *source)


def test_copy_truncate_and_checkpoint_in_one_step(engine, prompts):
    """The new checkpoint is one of the copy, made before anything is computed."""
    expected = [alone(engine, [*prompts[0], *prompts[n]], 1) for n in (2, 3)]
    at = with_checkpoint(engine, prompts)
    ops = [CopyPrefix(0, 1, at, 7), Truncate(0, at, 7), SaveCheckpoint(1, 8)]
    assert engine.step(Step(ops, [[prefill_input(1, prompts[2], at)]])).tokens == tuple(expected[0])
    assert engine.step(step(prefill_input(0, prompts[3], at))).tokens == tuple(expected[1])
    assert engine.step(Step([Truncate(1, at, 8)], [[prefill_input(1, prompts[3], at)]])).tokens == tuple(expected[1])


def test_copying_a_whole_sequence_needs_no_checkpoint(engine, prompts):
    expected = alone(engine, [*prompts[0], *prompts[2]], 1)
    engine.step(step(StepInput(0, 0, prompts[0], ())))
    at = len(prompts[0])
    assert engine.step(Step([CopyPrefix(0, 1, at)], [[prefill_input(1, prompts[2], at)]])).tokens == tuple(expected)


def test_a_dropped_checkpoint_takes_no_room(engine, prompts):
    with_checkpoint(engine, prompts)
    assert checkpoint_bytes(engine, 7) > 0
    engine.step(Step([DropCheckpoint(7), DropCheckpoint(99)]))
    assert checkpoint_bytes(engine, 7) == 0


def test_a_state_and_its_checkpoints_are_measured_separately(engine, prompts):
    with_checkpoint(engine, prompts)
    [without] = state_sizes(engine, 0)
    n_bytes, first, missing, again = state_sizes(engine, 0, 7, 99, 7)
    assert n_bytes == without > 0
    assert first == again > 0
    assert missing == 0


def saved_with_checkpoint(engine, prompts, new_file, offset=0):
    """Save sequence 0 and checkpoint 7 to a file, then drop both.

    Returns:
        The descriptor, and the bytes of the state and of the checkpoint.
    """
    n_bytes, size = state_sizes(engine, 0, 7)
    fd = new_file(bytes(offset + n_bytes + size))
    output = engine.step(Step([SaveState(0, fd, offset, n_bytes, ((7, size),))]))
    assert not output.refused
    assert output.saved_bytes == n_bytes + size
    engine.step(Step([Truncate(0), DropCheckpoint(7)]))
    return fd, n_bytes, size


@pytest.mark.parametrize("offset", [0, 4096])
def test_checkpoints_are_saved_and_loaded_with_a_state(engine, prompts, new_file, offset):
    expected = alone(engine, [*prompts[0], *prompts[2]], 1)
    at = with_checkpoint(engine, prompts)
    fd, n_bytes, size = saved_with_checkpoint(engine, prompts, new_file, offset)
    load = LoadState(2, at + len(prompts[1]), fd, offset, n_bytes, ((9, size),))
    assert not engine.step(Step([load])).refused
    assert engine.used_cells() == {2: at + len(prompts[1])}
    assert state_sizes(engine, 2, 9, 7)[1:] == [size, 0]
    assert engine.step(Step([Truncate(2, at, 9)], [[prefill_input(2, prompts[2], at)]])).tokens == tuple(expected)


@pytest.mark.cpu("the best two tokens of a random model are nearly as likely, and a GPU rounds otherwise")
def test_a_checkpoint_in_a_file_can_be_skipped(engine, prompts, new_file):
    expected = alone(engine, [*prompts[0], *prompts[1], *prompts[2]], 1)
    n_tokens = with_checkpoint(engine, prompts) + len(prompts[1])
    fd, n_bytes, size = saved_with_checkpoint(engine, prompts, new_file)
    assert not engine.step(Step([LoadState(2, n_tokens, fd, 0, n_bytes, ((None, size),))])).refused
    assert checkpoint_bytes(engine, 7) == 0
    assert engine.step(step(prefill_input(2, prompts[2], n_tokens))).tokens == tuple(expected)


def test_a_save_with_a_wrong_checkpoint_is_refused(engine, prompts, new_file):
    with_checkpoint(engine, prompts)
    n_bytes, size = state_sizes(engine, 0, 7)
    fd = new_file(bytes(n_bytes + 2 * size))
    for wrong in ((8, size), (7, size - 1), (7, size + 1)):
        assert_refused(engine.step(Step([SaveState(0, fd, 0, n_bytes, (wrong,))])), 0)
    short = new_file(bytes(n_bytes + size - 1))
    assert_refused(engine.step(Step([SaveState(0, short, 0, n_bytes, ((7, size),))])), 0)
    assert not engine.step(Step([SaveState(0, fd, 0, n_bytes, ((7, size),))])).refused


def test_a_refused_load_keeps_none_of_its_checkpoints(engine, prompts, new_file):
    n_tokens = with_checkpoint(engine, prompts) + len(prompts[1])
    fd, n_bytes, size = saved_with_checkpoint(engine, prompts, new_file)
    short = new_file(bytes(n_bytes))
    for wrong in (
        LoadState(2, n_tokens + 1, fd, 0, n_bytes, ((9, size),)),
        LoadState(2, n_tokens, short, 0, n_bytes, ((9, size),)),
    ):
        assert_refused(engine.step(Step([wrong])), 2)
        assert engine.used_cells() == {}
        assert checkpoint_bytes(engine, 9) == 0
