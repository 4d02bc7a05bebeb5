"""The bench ``pictures.py`` as a command.  Durations are not judged."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from tests.support.bench_scripts import FOLDER

pytestmark = pytest.mark.benches
pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")


@pytest.mark.timeout(320)
def test_streams_go_on_while_pictures_arrive(library, tmp_path):
    out = tmp_path / "runs.csv"
    done = subprocess.run(
        [
            sys.executable, FOLDER / "pictures.py", "--no-rival", "--threads", "1", "--pin", "none",
            "--streams", "2", "--tokens", "40", "--pictures", "3", "--csv", out,
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with out.open() as file:
        [row] = csv.DictReader(file)
    assert row["server"] == "uma-trio"
    assert 0 < float(row["gap_p50_ms"]) <= float(row["gap_p99_ms"]) <= float(row["gap_max_ms"])
    assert 0 < float(row["first_ms"]) <= float(row["last_ms"])
    assert min(float(row["again_ms"]), float(row["alone_ms"])) > 0
    assert float(row["cpu_s"]) > 0
