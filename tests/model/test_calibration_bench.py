"""The bench ``calibration.py`` as a command, with tiny loads: two parts, and what they show together."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bench_scripts import FOLDER

pytestmark = pytest.mark.benches
pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")

TINY = (
    "--requests",
    "5",
    "--rate",
    "20",
    "--prompt-tokens",
    "20",
    "--tokens",
    "5",
    "--tokens",
    "10",
    "--deadline-s",
    "60",
)


def bench(*arguments: str) -> str:
    command = [sys.executable, str(FOLDER / "calibration.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_parts_are_shown_together(library: object, tmp_path: Path) -> None:
    files = [tmp_path / f"{seed}.csv" for seed in (1, 2)]
    options = (*TINY, "--threads", "1", "--pin", "none")
    shown = [bench(*options, "--seed", file.stem, "--csv", str(file)) for file in files]
    rows = [[*csv.DictReader(file.read_text().splitlines())] for file in files]
    assert all(rows)
    assert all(bench("--join", str(file)).strip() in before for file, before in zip(files, shown, strict=True))
    joined = bench("--join", str(files[0]), "--join", str(files[1]))
    n = len(rows[0]) + len(rows[1])
    assert f" {n} |" in next(line for line in joined.splitlines() if line.startswith("| all"))
    n_refused = sum(row["is_refused"] == "True" for row in (*rows[0], *rows[1]))
    assert f"deadlines: {n_refused} of {n} refused" in joined
