"""How much a run of the tests tries: ``pytest`` is quick, ``pytest --profile thorough`` searches long.

CI runs the quick profile.  ``pytest --profile whole`` has its amounts, and also the tests that it leaves out.

The numbers of both stand next to each test that repeats something:

    @settings(max_examples=amount(quick=60, thorough=2000))

A test that only repeats what others prove has the marker ``thorough``: the quick profile leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

VARIABLE = "UMA_TEST_PROFILE"
"""Environment variable with the profile; ``tests/conftest.py`` sets it before any test is imported."""
PROFILES = {
    # The same examples in every run.
    "quick": (same := settings(derandomize=True, deadline=None, max_examples=20)),
    "whole": same,
    "thorough": settings(derandomize=False, deadline=None, max_examples=1000, print_blob=True),
}


def choose(profile: str) -> None:
    """Make ``profile`` that of this process and of those that it starts."""
    os.environ[VARIABLE] = profile
    if profile != "thorough":  # hypothesis would also try numbers and texts of the modules that are imported by then
        providers._get_local_constants = lambda: providers._local_constants
    settings.register_profile(profile, PROFILES[profile])
    settings.load_profile(profile)


def is_quick() -> bool:
    return os.environ[VARIABLE] == "quick"


def is_thorough() -> bool:
    return os.environ[VARIABLE] == "thorough"


def amount(*, quick: int, thorough: int) -> int:
    """How many of something this run tries."""
    return thorough if is_thorough() else quick


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Equal cases of ``pytest.mark.parametrize``, of which the quick profile takes the first and each one ``every`` later."""
    return [_case(case, *[pytest.mark.thorough] * bool(n % every)) for n, case in enumerate(cases)]


def _case(case: Any, *marks: pytest.MarkDecorator) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, *marks], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)


def part(cases: Sequence[Any], every: int) -> Sequence[Any]:
    """As ``sampled``, for cases of one test: those that this run tries."""
    return cases[::every] if is_quick() else cases


def thorough(*values: Any) -> Any:
    """A case of ``pytest.mark.parametrize`` that the quick profile leaves out."""
    return pytest.param(*values, marks=pytest.mark.thorough)
