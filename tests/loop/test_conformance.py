"""The fake engine keeps the contract of engines."""

from __future__ import annotations

import functools

import pytest

from tests.support.engine_contract import *  # noqa: F403  (the tests)
from tests.support.engine_contract import step
from tests.support.fake_engine import FakeEngine
from uma_trio.engine.calibrate import calibrate
from uma_trio.engine.messages import EngineError, StepInput


@pytest.fixture(
    params=[{}, {"repeats": 3}, {"rewinds": False}], ids=["fake", "one that repeats", "one that cannot be cut"]
)
def make(request):
    return functools.partial(FakeEngine, **request.param)


@pytest.fixture
def prompts():
    return [[5, 6, 7, 8, 9], [20, 21, 22, 23], [40, 41, 42, 43, 44, 45, 46], [90, 91]]


def test_stricter_than_llama_cpp_it_wants_every_sequence_to_begin_at_zero():
    """llama.cpp computes one that begins later, as if something stood before it; for the scheduler that is a defect."""
    with pytest.raises(EngineError, match="fed at 3"):
        FakeEngine().step(step(StepInput(0, 3, [1, 2], ())))


@pytest.mark.parametrize("n_batch", [16, 32, 48, 64, 512])
@pytest.mark.parametrize("n_seq_max", [1, 4, 16])
def test_calibration_keeps_the_contract_too(n_batch, n_seq_max):
    """Whatever the engine has room for: steps that are too large for it are left out."""
    engine = FakeEngine(n_batch=n_batch, n_seq_max=n_seq_max)
    calibrate(engine)
    assert engine.used_cells() == {}
