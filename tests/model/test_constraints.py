"""Constrained output with the real library: generated constraints, and equivalences."""

from __future__ import annotations

from collections import Counter

from tests.fuzz.schemas import run_cases
from tests.support.real_daemon import Daemon
from tests.support.schemas import make_case


def test_generated_constraints_are_followed_or_refused(daemon: Daemon) -> None:
    """``python -m tests.fuzz.schemas`` sends more of them."""
    outcomes = run_cases(daemon, range(60))
    wrong = {make_case(seed).name: outcome for seed, outcome in outcomes.items() if outcome.kind == "wrong"}
    assert not wrong
    kinds = Counter(outcome.kind for outcome in outcomes.values())
    assert kinds["complete"] >= 36
    assert kinds.total() == 60
