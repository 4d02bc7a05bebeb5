"""A few faults of the search; the command line has more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.cluster_faults import search
from tests.support.profile import is_thorough
from tests.support.real_daemon import missing


@pytest.mark.thorough
@pytest.mark.skipif(not is_thorough(), reason="a search: pytest --profile thorough runs it")
@pytest.mark.parametrize("n_daemons", [2, 3])
def test_no_fault_of_a_daemon_loses_or_forks_a_session(n_daemons: int, tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    found = search(5, n_daemons, tmp_path, n_daemons=n_daemons)
    assert found.problems == []
    assert found.outcomes["answered"] > 0
