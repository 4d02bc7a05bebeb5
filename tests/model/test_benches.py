"""The benches, the notebook and the demo run, on the real daemon.  How fast they find it is not judged here."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> tuple[Path, str]:
    """A short mixed load: its CSV and what the bench printed."""
    target = tmp_path_factory.mktemp("bench") / "mixed.csv"
    done = subprocess.run(
        [sys.executable, ROOT / "benches/mixed_load.py", "--tokens", "60", "--long-words", "400", "--long-tokens", "8",
         "--long-after", "10", "--csv", target],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return target, done.stdout


def test_mixed_load_writes_every_token(recording):
    with recording[0].open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["session_id", "token_idx", "ts_ms", "is_interactive"]
    sizes: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        sizes.setdefault((row["session_id"], row["is_interactive"]), []).append(int(row["token_idx"]))
    assert sorted(len(found) for found in sizes.values()) == [8, 60, 60, 60]
    assert all(found == list(range(len(found))) for found in sizes.values())
    assert [interactive for _, interactive in sizes].count("1") == 3


def test_mixed_load_says_where_and_with_what(recording):
    for word in ("llama-cpp-python==", "threads", "TTFT", "ITL", "batch"):
        assert word in recording[1], word


@pytest.mark.slow
def test_the_notebook_draws_it(recording, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="./build_llama.sh --dev installs it")
    nbclient = pytest.importorskip("nbclient", reason="./build_llama.sh --dev installs it")
    monkeypatch.setenv("MIXED_LOAD_CSV", str(recording[0]))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(ROOT / "notebooks/latency.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is committed without outputs"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(ROOT / "notebooks"))
    pictures = [
        output.data["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 3
    assert all(len(picture) > 10_000 for picture in pictures), "an empty plot"


@pytest.mark.slow
def test_the_demo_runs_to_its_scorecard():
    done = subprocess.run(
        [sys.executable, "-m", "uma_trio", "demo", "--json"], capture_output=True, text=True, timeout=180
    )
    assert done.returncode in (0, 1), done.stderr
    card = json.loads(done.stdout)
    passed = {check["name"]: check["passed"] for check in card["checks"]}
    assert set(passed) == {"all streams finished", "tokens interleaved", "average batch", "no chat froze", "same text as alone"}
    del passed["no chat froze"]  # a matter of milliseconds: a busy machine may fail it
    assert all(passed.values()), card["checks"]
