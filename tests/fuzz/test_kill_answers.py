"""A short search; run ``python -m tests.fuzz.kill_answers`` for long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.kill_answers import search
from tests.support.profile import is_thorough
from tests.support.real_daemon import missing


@pytest.mark.thorough
@pytest.mark.skipif(not is_thorough(), reason="a search: pytest --profile thorough runs it")
def test_answers_survive_the_deaths_of_all_processes(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    found = search(rounds=6, seed=1, folder=tmp_path)
    assert found.problems == []
    assert found.deaths
