"""The bench ``closed_loops.py`` as a command.  Durations are not judged."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from tests.support.bench_scripts import FOLDER

pytestmark = pytest.mark.benches
pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")


@pytest.mark.timeout(620)
def test_each_combination_has_a_row(library, tmp_path):
    out = tmp_path / "runs.csv"
    done = subprocess.run(
        [
            sys.executable, FOLDER / "closed_loops.py", "--no-rival", "--threads", "1", "--pin", "none",
            "--clients", "1,3", "--prompts", "20", "--answers", "1,5", "--csv", out,
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["cell"] for row in rows] == ["1 x 20 + 1", "1 x 20 + 5", "3 x 20 + 1", "3 x 20 + 5"]
    for row in rows:
        assert float(row["ttft_ms"]) <= float(row["latency_ms"]) <= 1e3 * float(row["wall_s"])
        assert f"| {row['cell']} " in done.stdout
