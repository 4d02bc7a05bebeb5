"""What every engine must do whose model's memory cannot be cut; fixtures as for ``engine_contract``."""

from __future__ import annotations

import pytest

from tests.support.engine_contract import alone, prefill_input, step
from uma_trio.engine.messages import (
    CopyPrefix,
    DropCheckpoint,
    EngineError,
    Load,
    Save,
    SaveCheckpoint,
    Step,
    StepInput,
    Truncate,
)


@pytest.fixture
def engine(make):
    return make(n_ctx=1024, n_seq_max=4, n_batch=64)


def marked(engine, prompts):
    """A sequence with a checkpoint after the first prompt, 7, and the second one behind it."""
    engine.step(step(StepInput(0, 0, prompts[0], ())))
    engine.step(Step([SaveCheckpoint(0, 7)], [[StepInput(0, len(prompts[0]), prompts[1], ())]]))
    return len(prompts[0])


def test_without_a_checkpoint_it_cannot_be_cut(engine, prompts):
    at = marked(engine, prompts)
    for wrong in (Truncate(0, at + 1), Truncate(0, at), Truncate(0, at, 8)):
        with pytest.raises(EngineError) as caught:
            engine.step(Step([wrong]))
        assert caught.value.fatal
        engine.reset()
        assert engine.checkpoint_bytes(7) == 0
        marked(engine, prompts)


def test_back_to_a_checkpoint_as_often_as_wanted(engine, prompts):
    expected = [alone(engine, [*prompts[0], *more], 1) for more in prompts[1:]]
    at = marked(engine, prompts)
    for more, said in zip(prompts[1:], expected, strict=True):
        assert engine.step(Step([Truncate(0, at, 7)], [[prefill_input(0, more, pos=at)]])).tokens == tuple(said)
        assert engine.used_cells() == {0: at + len(more)}


def test_a_copy_of_what_is_before_a_checkpoint_goes_on_and_so_does_the_source(engine, prompts):
    one = alone(engine, [*prompts[0], *prompts[2]], 1)
    other = alone(engine, [*prompts[0], *prompts[1], 5], 1)
    at = marked(engine, prompts)
    inputs = [prefill_input(1, prompts[2], pos=at), prefill_input(0, [5], pos=at + len(prompts[1]))]
    assert engine.step(Step([CopyPrefix(0, 1, at, 7)], [inputs])).tokens == (*one, *other)


def test_copied_from_and_put_back_in_one_step(engine, prompts):
    """And a checkpoint of the copy, before anything is computed."""
    expected = [alone(engine, [*prompts[0], *prompts[n]], 1) for n in (2, 3)]
    at = marked(engine, prompts)
    edits = [CopyPrefix(0, 1, at, 7), Truncate(0, at, 7), SaveCheckpoint(1, 8)]
    assert engine.step(Step(edits, [[prefill_input(1, prompts[2], pos=at)]])).tokens == tuple(expected[0])
    assert engine.step(step(prefill_input(0, prompts[3], pos=at))).tokens == tuple(expected[1])
    assert engine.step(Step([Truncate(1, at, 8)], [[prefill_input(1, prompts[3], pos=at)]])).tokens == tuple(
        expected[1]
    )


def test_a_copy_of_the_whole_needs_none(engine, prompts):
    expected = alone(engine, [*prompts[0], *prompts[2]], 1)
    engine.step(step(StepInput(0, 0, prompts[0], ())))
    at = len(prompts[0])
    assert engine.step(Step([CopyPrefix(0, 1, at)], [[prefill_input(1, prompts[2], pos=at)]])).tokens == tuple(expected)


def test_what_is_forgotten_takes_no_room(engine, prompts):
    marked(engine, prompts)
    assert engine.checkpoint_bytes(7) > 0
    engine.step(Step([DropCheckpoint(7), DropCheckpoint(99)]))
    assert engine.checkpoint_bytes(7) == 0


def test_checkpoints_are_saved_and_loaded_with_a_state(engine, prompts):
    expected = alone(engine, [*prompts[0], *prompts[2]], 1)
    at = marked(engine, prompts)
    state, kept = bytearray(engine.state_bytes(0)), bytearray(engine.checkpoint_bytes(7))
    assert not engine.step(Step([Save(0, state, [(7, kept)])])).refused
    engine.step(Step([Truncate(0), DropCheckpoint(7)]))
    load = Load(2, at + len(prompts[1]), bytes(state), [(9, bytes(kept))])
    assert not engine.step(Step([load])).refused
    assert engine.step(Step([Truncate(2, at, 9)], [[prefill_input(2, prompts[2], pos=at)]])).tokens == tuple(expected)
    for wrong in ((8, kept), (9, bytearray(len(kept) - 1))):
        assert [
            seq_id for seq_id, _ in engine.step(Step([Save(2, bytearray(engine.state_bytes(2)), [wrong])])).refused
        ] == [2]
