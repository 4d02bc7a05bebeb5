"""A short run of the mutated pictures; ``python -m tests.fuzz.mutate_pictures`` is the long one."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.mutate_pictures import mutated, named, originals, run
from tests.support.pictures import bombs
from tests.support.profile import amount
from tests.support.projectors import projector_file
from tests.support.real_daemon import real_daemon


def test_no_file_harms_anybody(tmp_path: Path) -> None:
    files = [*named(seed=1, count=amount(quick=100, thorough=2000)), *bombs().items()]
    with real_daemon("--mmproj", str(projector_file(tmp_path))) as daemon:
        counts, problems = run(daemon, files)
    assert not problems
    assert min(counts["encoded"], counts["refused"]) >= 10, counts
    assert counts["killed the encoder"] == 0, counts


def test_a_run_can_be_repeated() -> None:
    files = originals()
    assert [mutated(files, 0, n) for n in range(50)] == [mutated(files, 0, n) for n in range(50)]
    assert mutated(files, 0, 3) != mutated(files, 1, 3)
