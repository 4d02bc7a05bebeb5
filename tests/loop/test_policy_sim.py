"""The simulation of the scheduling policies runs, and no request starves."""

import csv
import subprocess
import sys
from pathlib import Path

import uma_trio

BENCH = Path(uma_trio.__file__).parent.parent / "benches/policy_sim.py"


def test_a_small_run_prints_both_policies_and_writes_csv(tmp_path: Path) -> None:
    file = tmp_path / "policy.csv"
    ran = subprocess.run(
        [sys.executable, BENCH, "--requests", "60", "--csv", file],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("cpu ")
    assert ran.stdout.rstrip().endswith("Nobody starved.")
    with file.open(newline="") as written:
        rows = list(csv.DictReader(written))
    assert {(row["device"], row["policy"]) for row in rows} == {
        (device, policy)
        for device in ("cpu", "gpu", "wide", "h100", "h200", "tiles")
        for policy in ("uma-trio", "fill the batch")
    }
    assert sum(int(row["requests"]) for row in rows) == 60 * 12


def test_a_burst_of_prompts_is_served_soon_and_no_stream_freezes(tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    ran = subprocess.run(
        [sys.executable, BENCH, "--device", "cpu", "--burst", "32", "--csv", file],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "| uma-trio" in ran.stdout
    with file.open(newline="") as written:
        ours = next(row for row in csv.DictReader(written) if (row["policy"], row["class"]) == ("uma-trio", "normal"))
    assert int(ours["requests"]) == 32
    assert float(ours["ttft_max_ms"]) < 12_000, "without the rule for overdue prompts it is 14,600"
    assert float(ours["itl_max_ms"]) < 250
