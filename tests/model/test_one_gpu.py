"""The bench ``one_gpu.py`` as a command, on a CPU with tiny loads.  Durations are not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from llama_abi.locations import library_directory
from tests.model.test_benches import PEERS
from tests.support.bench_scripts import FOLDER, bench_script

pytestmark = pytest.mark.benches
pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")


@pytest.mark.timeout(620)
def test_every_load_has_its_rows(library, tmp_path):
    if not (PEERS / "llama-server").exists():
        pytest.skip(f"there is no llama-server in {PEERS}: ./build_llama.sh --peers builds it")
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [
            sys.executable, FOLDER / "one_gpu.py", "--quick", "--threads", "1", "--pin", "none", "--rival-flags", "-ngl 0",
            "--backend", f"vulkan={library_directory()},{PEERS}", "--out", out,
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    rows = json.loads(out.read_text())
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows), rows
    works = {row["work"] for row in rows}
    for load in ("first start", "mixed load", "2 streams, HTTP", "2 streams under a schema", "small model, 1 streams"):
        assert any(load in work for work in works), (load, works)
    table = done.stdout.split("\n\n")[-1].splitlines()
    assert len(table) == 2 + len(rows)


def test_a_verdict_follows_from_the_bounds() -> None:
    row = bench_script("one_gpu").Row
    assert row("cuda", "load", "p99 ms", 10.0, 50.0, most=0.25).verdict == "yes"
    assert row("cuda", "load", "p99 ms", 20.0, 50.0, most=0.25).verdict == "no"
    assert row("cuda", "load", "tok/s", 94.0, 100.0, least=0.95).verdict == "no"
    assert row("cuda", "load", "tok/s", None, 100.0, least=0.95).verdict == ""
    assert row("cuda", "load", "tok/s", 94.0, 100.0).verdict == ""
