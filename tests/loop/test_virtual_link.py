"""Masks of controllers in virtual time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import trio

from tests.support.fake_engine import FakeEngine, VirtualLink
from tests.support.masks import SharedMasks
from uma_trio.engine_link.messages import MASK_LATE, Revoked, SampleRequest, Step, StepInput, StepOutput
from uma_trio.engine_link.sampling import SamplingParams

COST_MS = 10.0
ROWS = {1: 1}


@pytest.fixture
def link():
    link = VirtualLink(FakeEngine(cost_ms=lambda prompt, decodes: COST_MS))
    masks = SharedMasks(n_rows=2, n_vocab=link.info.n_vocab)
    masks.allow_only(1, 7)
    link.attach_masks(masks.file)
    yield link
    masks.close()


def step(number: int, follows: int = 0) -> Step:
    sample = SampleRequest(SamplingParams(), controller_mask=1)
    return Step((), [[StepInput(0, 0, [5, 6], [sample])]], number, follows, mask_timeout_ms=30)


async def masks_after(link: VirtualLink, ms: float, number: int, rows: Mapping[int, int] = ROWS) -> None:
    await trio.sleep(ms / 1e3)
    link.masks_ready(number, rows)


@pytest.mark.parametrize(("ms", "duration_ms"), [(0, COST_MS), (4, COST_MS), (25, 25), (39, 39)])
async def test_a_step_ends_when_it_is_computed_and_has_its_masks(autojump_clock, nursery, link, ms, duration_ms):
    began = trio.current_time()
    link.submit(step(1))
    nursery.start_soon(masks_after, link, ms, 1)
    [output] = await link.receive()
    assert output.tokens == (7,)
    assert trio.current_time() - began == pytest.approx(duration_ms / 1e3)


async def test_masks_that_come_too_late(autojump_clock, nursery, link):
    began = trio.current_time()
    link.submit(step(1))
    nursery.start_soon(masks_after, link, 41, 1)
    [output] = await link.receive()
    assert output.tokens == (MASK_LATE,)
    assert trio.current_time() - began == pytest.approx((COST_MS + 30) / 1e3)


async def test_a_row_that_is_missing(autojump_clock, link):
    link.submit(step(1))
    link.masks_ready(1, {0: 1})
    [output] = await link.receive()
    assert output.tokens == (MASK_LATE,)


async def test_masks_of_another_step_are_none_of_this(autojump_clock, link):
    link.submit(step(1))
    link.masks_ready(9, ROWS)
    [output] = await link.receive()
    assert output.tokens == (MASK_LATE,)


async def test_a_step_that_waits_for_masks_has_begun_and_what_is_behind_it_has_not(autojump_clock, nursery, link):
    link.submit(step(1))
    plain = StepInput(1, 0, np.array([5, 6]), [SampleRequest(SamplingParams())])
    link.submit(Step((), [[plain]], 2, 1))
    link.revoke(1)
    link.revoke(2)
    nursery.start_soon(masks_after, link, 20, 1)
    answers = []
    while len(answers) < 2:
        answers += await link.receive()
    assert isinstance(answers[0] if isinstance(answers[0], StepOutput) else answers[1], StepOutput)
    assert Revoked(2) in answers
