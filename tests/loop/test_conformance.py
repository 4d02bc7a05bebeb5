"""The fake engine keeps the engine contract."""

from __future__ import annotations

import pytest

from tests.support.engine_contract import *  # noqa: F403  (the tests)
from tests.support.engine_contract import step
from tests.support.fake_engine import FakeEngine, VirtualLink
from uma_trio.daemon.engines.calibrate import calibrate
from uma_trio.engine_link.messages import EngineError, StepInput


@pytest.fixture(params=[{}, {"repeats": 3}, {"can_truncate": False}], ids=["fake", "repeating", "recurrent"])
def make(request):
    def make(*, adapters=False, **options):
        return FakeEngine(**request.param, **options, adapters=("one", "two") if adapters else ())

    return make


@pytest.fixture
def prompts():
    return [[5, 6, 7, 8, 9], [20, 21, 22, 23], [40, 41, 42, 43, 44, 45, 46], [90, 91]]


def test_a_sequence_that_does_not_start_at_position_zero_fails():
    """Stricter than llama.cpp, which computes such a sequence.  If the scheduler asks for one, it has a defect."""
    with pytest.raises(EngineError, match="continued at 3"):
        FakeEngine().step(step(StepInput(0, 3, [1, 2], ())))


@pytest.mark.parametrize("n_batch", [16, 32, 48, 64, 512])
@pytest.mark.parametrize("n_seq_max", [1, 4, 16])
async def test_calibration_keeps_the_contract(autojump_clock, n_batch, n_seq_max):
    """Calibration leaves out steps that are too large for the engine."""
    engine = FakeEngine(n_batch=n_batch, n_seq_max=n_seq_max)
    await calibrate(VirtualLink(engine))
    assert engine.used_cells() == {}
