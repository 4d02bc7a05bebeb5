"""The fake engine's draft model keeps the contract."""

from __future__ import annotations

import functools

import pytest

from tests.support.draft_contract import *  # noqa: F403  (the tests)
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def drafting():
    return functools.partial(FakeEngine, draft_errors=0)


@pytest.fixture
def prompts():
    return [[5, 6, 7, 8, 9], [20, 21, 22, 23], [40, 41, 42, 43, 44, 45, 46], [90, 91]]
