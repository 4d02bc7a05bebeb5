"""Short runs of the mutated files; ``python -m tests.fuzz.mutate_media`` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.mutate_media import media, mutated, named, run
from tests.support.profile import amount
from tests.support.projectors import projector_file
from tests.support.real_daemon import real_daemon


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["pictures", "sound"])
def test_no_file_harms_anybody(tmp_path: Path, kind: str) -> None:
    chosen = media(kind)
    files = named(chosen, 1, range(amount(quick=40, thorough=2000)))
    with real_daemon("--mmproj", str(projector_file(tmp_path, chosen.projector))) as daemon:
        counts, problems = run(daemon, chosen.part, files)
    assert not problems
    assert min(counts["encoded"], counts["refused"]) >= 10, counts
    assert counts["killed the encoder"] == 0, counts


def test_a_run_can_be_repeated() -> None:
    files = media("sound").originals
    assert [mutated(files, 0, n) for n in range(50)] == [mutated(files, 0, n) for n in range(50)]
    assert mutated(files, 0, 3) != mutated(files, 1, 3)
